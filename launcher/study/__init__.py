"""Studies: many runs and one question. Each keeps its trials in a table, and repeats none that the table holds."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.study.preprocessing_study import PreprocessingStudy, preprocessing
    from launcher.study.scaling_study import ScalingStudy, scaling
    from launcher.study.stories import PublishedStory, story

__all__ = ["PreprocessingStudy", "PublishedStory", "ScalingStudy", "preprocessing", "scaling", "story"]


def __getattr__(name: str) -> object:
    """A study is imported when it is asked for: `import launcher` does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("PreprocessingStudy", "preprocessing"):
        from launcher.study import preprocessing_study

        return getattr(preprocessing_study, name)
    if name in ("ScalingStudy", "scaling"):
        from launcher.study import scaling_study

        return getattr(scaling_study, name)
    from launcher.study import stories

    return getattr(stories, name)
