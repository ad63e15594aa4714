"""Run the GPU suite, or parts of it, and write its page.

    python -m tests.gpu                    all parts, then docs/results/gpu.md
    python -m tests.gpu 2                  one part, by its number or name; the page has all results so far
    python -m tests.gpu --only compiled    one check
    python -m tests.gpu --skip-passed            without the checks that already passed for this commit on such a GPU
    python -m tests.gpu 1 --beside         as one of several calls at once, on the same GPU: the page says that its times are no record
    python -m tests.gpu page               the page from the existing results; needs no GPU
    python -m tests.gpu 2 --results DIR --page FILE --commit ID    elsewhere, if the source is not a git checkout
    python -m tests.gpu --rehearse         whatever can run on the CPU, at toy sizes; its page is no record
    python -m tests.gpu --if-any           the same as without, but no GPU is no failure

Exit code 0: everything checked passed; 1: a check failed; 2: no GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.gpu import ROOT, isolation, machine, outcomes, page, suite


def main() -> int:
    options = _options()
    if options.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    folder = options.results or ROOT / ("output/gpu-rehearsal" if options.rehearse else "tests/gpu/results")
    place = options.page or (folder / "gpu.md" if options.rehearse else ROOT / "docs/results/gpu.md")
    if options.parts == ["page"]:
        return _write_page(place, folder)
    missing = machine.no_gpu()
    if missing and not options.rehearse:
        print(missing)
        return 0 if options.if_any else 2
    suite.warm_up()
    described = _described(options.command, options.commit, folder) | {"beside": options.beside}
    make_bench = functools.partial(_bench, options.rehearse)
    for part in options.parts:
        print(f"part {suite.PARTS.index(part) + 1} of {len(suite.PARTS)}: {part}", flush=True)
        suite.run_part(
            part,
            make_bench,
            folder,
            described,
            minutes=options.minutes,
            wanted=options.only,
            skip_passed=options.skip_passed,
        )
    return _write_page(place, folder)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"by number or name: {', '.join(suite.PARTS)}; or page")
    parser.add_argument(
        "--only", action="append", default=[], choices=[check.name for check in suite.CHECKS], metavar="CHECK"
    )
    parser.add_argument(
        "--skip-passed", action="store_true", help="without what passed before, of this commit on such a GPU"
    )
    parser.add_argument("--beside", action="store_true", help="other calls use the same GPU meanwhile")
    parser.add_argument("--minutes", type=float, default=8, help="of a part, at most")
    parser.add_argument(
        "--results", type=Path, help="folder of the results; tests/gpu/results unless given, whose files are committed"
    )
    parser.add_argument("--page", type=Path, help="docs/results/gpu.md unless given")
    parser.add_argument("--commit", help="of the source, where git cannot tell it")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at toy sizes")
    parser.add_argument("--if-any", action="store_true", help="exit 0 where there is no GPU")
    options = parser.parse_args()
    if options.parts != ["page"]:
        names = [
            suite.PARTS[int(name) - 1] if name.isdigit() and 0 < int(name) <= len(suite.PARTS) else name
            for name in options.parts
        ]
        unknown = [name for name in names if name not in suite.PARTS]
        if unknown:
            parser.error(f"no part {', '.join(unknown)}: {', '.join(suite.PARTS)}, or 1 to {len(suite.PARTS)}")
        options.command = " ".join(
            [
                "python -m tests.gpu",
                *names,
                *(f"--only {name}" for name in options.only),
                *(["--skip-passed"] * options.skip_passed),
                *(["--beside"] * options.beside),
                *(["--rehearse"] * options.rehearse),
            ]
        )
        options.parts = names or [*suite.PARTS]
    for given in ("results", "page"):
        if getattr(options, given) is not None:
            setattr(options, given, getattr(options, given).absolute())
    return options


def _described(command: str, commit: str | None, folder: Path) -> dict:
    """The machine, described in another process: this one must not start CUDA."""
    with tempfile.TemporaryDirectory() as place:
        answer, log = Path(place) / "machine.json", folder / "logs/machine.log"
        code = isolation.run_isolated(lambda: outcomes.write_json(answer, machine.describe(command, commit)), log, 120)
        if code:
            raise RuntimeError(f"the machine cannot be described: {isolation.tail(log)}")
        return json.loads(answer.read_text(encoding="utf-8"))


def _bench(rehearse: bool, folder: Path) -> object:
    import torch

    from tests.gpu import bench

    if rehearse:
        torch.set_num_threads(1)
    return bench.Bench(torch.device("cpu" if rehearse else "cuda:0"), bench.TINY if rehearse else bench.REAL, folder)


def _write_page(place: Path, folder: Path) -> int:
    found = outcomes.read(folder)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(page.render(found), encoding="utf-8")
    failed = [name for name, outcome in found.items() if outcome.status in outcomes.FAILURES]
    print(f"{place}: {len(found)} checks" + (f", failed: {', '.join(failed)}" if failed else ", none failed"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
