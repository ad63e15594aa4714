"""Studies: many runs and one question. Each keeps its trials in a table, and repeats none that the table holds."""

__all__ = ["PreprocessingStudy", "preprocessing"]


def __getattr__(name: str) -> object:
    """A study is imported when it is asked for: `import launcher` does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from launcher.study import preprocessing_study

    return getattr(preprocessing_study, name)
