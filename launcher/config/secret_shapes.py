"""What secrets look like. The observer defines it, to keep them out of its record: entrypoints/launcher_observer/secret_shapes.py."""

from __future__ import annotations

from collections.abc import Callable

from launcher.config.entrypoints import kit_modules

# at once, not when first asked: threads ask too, and an import changes what all of them share
with kit_modules("launcher_observer.secret_shapes") as (_shapes,):
    names_a_secret: Callable[[str], bool] = _shapes.names_a_secret
    secrets_in_text: Callable[[bytes], dict[str, int]] = _shapes.secrets_in_text
