class Error(Exception):
    pass


class OverlongPromptError(Error):
    pass
