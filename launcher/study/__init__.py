"""Studies: many runs that answer one question. A study keeps its trials in a table, and repeats none that it holds."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.study.preprocessing_study import PreprocessingStudy, preprocessing
    from launcher.study.scaling_study import ScalingStudy, scaling

__all__ = ["PreprocessingStudy", "ScalingStudy", "preprocessing", "scaling"]


def __getattr__(name: str) -> object:
    """Import a study when it is first used, not on `import launcher`."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("PreprocessingStudy", "preprocessing"):
        from launcher.study import preprocessing_study

        return getattr(preprocessing_study, name)
    from launcher.study import scaling_study

    return getattr(scaling_study, name)
