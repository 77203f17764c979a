"""`regard doctor`: the command of the distribution regard-doctor, or a line that says where it is to be had."""

from __future__ import annotations

import importlib

try:
    from regard_doctor.command import doctor
    from regard_doctor.doctor_error import DoctorError

    MISTAKES: tuple[type[ValueError], ...] = (DoctorError,)
except ModuleNotFoundError as missing:
    if missing.name != "regard_doctor":
        raise
    MISTAKES = ()

    def doctor() -> None:
        """Find mistakes in the attention of Python sources; needs the package regard-doctor."""
        importlib.import_module("regard.doctor")  # which says where it is to be had


__all__ = ["MISTAKES", "doctor"]
