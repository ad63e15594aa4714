"""`launcher.diagnose`: why a run is slow. Numpy is imported when it is called, not with the launcher."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, overload

from launcher.findings import mistake

if TYPE_CHECKING:
    from launcher.insight.comparison import Comparison
    from launcher.insight.diagnosis import Diagnosis


@overload
def diagnose(source: str | Path) -> Diagnosis: ...
@overload
def diagnose(source: str | Path, after: str | Path) -> Comparison: ...
def diagnose(source: str | Path, after: str | Path | None = None) -> Diagnosis | Comparison:
    """Explain where a run's time went.

    Args:
        source: a run's name, its folder, or system metrics in Debugger's format, SageMaker's or ours: a folder or s3:// prefix
            profiler-output.
        after: the run after a change, to lay beside it.

    Returns:
        The diagnosis, or with `after` both of them side by side. Printing it shows it, a notebook too; `save_html` makes a page.

    Raises:
        UserError: nothing was measured there, or numpy is not installed.
    """
    try:
        from launcher.insight.comparison import Comparison
        from launcher.insight.diagnosis import Diagnosis
        from launcher.insight.measurements import read
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise mistake("diagnose", "not installed: numpy", "pip install numpy; the extra `local` brings it") from None
    found = Diagnosis(read(str(source)))
    return found if after is None else Comparison(found, Diagnosis(read(str(after))))
