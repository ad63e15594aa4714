"""Studies: many runs and one question. Each keeps its trials in a table, and repeats none that the table holds."""

__all__ = ["PreprocessingStudy", "PublishedStory", "ScalingStudy", "preprocessing", "scaling", "story"]


def __getattr__(name: str) -> object:
    """A study is imported when it is asked for: `import launcher` does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("PreprocessingStudy", "preprocessing"):
        from launcher.study import preprocessing_study as module
    elif name in ("ScalingStudy", "scaling"):
        from launcher.study import scaling_study as module
    else:
        from launcher.study import stories as module

    return getattr(module, name)
