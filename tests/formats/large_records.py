"""Zips whose records have sizes of 64 bits, alike with every Python."""

from zipfile import ZipInfo


class LargeRecord(ZipInfo):
    """To open with `force_zip64`; before 3.11.4, Python left the sizes in the fields of 32 bits."""

    def FileHeader(self, zip64: bool | None = None) -> bytes:
        """Return the local header."""
        self.create_version = self.extract_version = 45
        header = super().FileHeader(zip64)
        return header[:18] + b"\xff" * 8 + header[26:]
