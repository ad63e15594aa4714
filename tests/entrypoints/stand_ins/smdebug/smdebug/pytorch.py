"""The part of smdebug.pytorch that the entry scripts call."""

registered: list = []


class Hook:
    def __init__(self, file: str):
        self.file = file

    @classmethod
    def create_from_json_file(cls, json_file_path: str) -> "Hook":
        return cls(json_file_path)

    def register_module(self, module) -> None:
        registered.append((self.file, module))
