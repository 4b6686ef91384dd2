"""The errors moejax raises on purpose. Each message names the setting, its value, the rule and the way out."""


class MoejaxError(Exception):
    """Base of the errors that the command line prints as one sentence instead of a traceback."""


class ConfigError(MoejaxError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class DataError(MoejaxError, ValueError):
    """A token file or corpus that is missing, empty, misshapen or holds ids outside the vocabulary."""


class CheckpointError(MoejaxError, RuntimeError):
    """A run directory or checkpoint that cannot be read, written or continued."""


class TrainingError(MoejaxError, RuntimeError):
    """Training that cannot go on, such as losses that stay non-finite."""
