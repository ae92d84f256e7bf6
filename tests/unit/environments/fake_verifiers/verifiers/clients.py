class Client:
    def __init__(self, client_or_config):
        self._client = client_or_config
