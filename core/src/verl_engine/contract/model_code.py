"""Python code in a model folder: it is never run, and no setting allows it."""


def why_not_loaded(error: Exception) -> str:
    """Return why a library could not load a model folder; in our own words where the folder's own code is the reason.

    All that loads one passes ``trust_remote_code=False``. transformers then advises to allow it, which no setting does.
    """
    if "trust_remote_code" not in str(error):
        return str(error)
    return (
        "it needs Python code that the folder brings (auto_map in config.json or tokenizer_config.json), and such code "
        "is never run; use a model whose classes the installed transformers has, or install a release that has them"
    )
