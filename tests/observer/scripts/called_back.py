"""The training of trainer.py or lightning_fit.py, with the kit's callback for it."""

import sys

if sys.argv[1] == "transformers":
    from launcher_observer.transformers_callback import LauncherCallback
    from trainer import main
else:
    from launcher_observer.lightning_callback import LauncherCallback
    from lightning_fit import main

main([LauncherCallback()])
