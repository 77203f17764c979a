"""Settings of the doctor in `pyproject.toml`, table `[tool.regard.doctor]`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .code_explanation import check_documentation
from .doctor_error import DoctorError, nearest
from .finding import Severity
from .rules import RULES

_KEYS = ("select", "ignore", "exclude", "min-severity", "per-file-ignores", "documentation")


@dataclass(frozen=True, slots=True)
class DoctorSettings:
    """Codes to select and to ignore, everywhere or by patterns of paths; files to exclude; the least severity.

    documentation: the address of the folder of the documentation, which SARIF and HTML link to; "" for none.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    min_severity: Severity | None = None
    per_file_ignores: tuple[tuple[str, tuple[str, ...]], ...] = ()
    documentation: str = ""


def settings_near(path: Path) -> DoctorSettings:
    """The settings of the nearest `pyproject.toml` in the folder of `path` or above; the defaults where there is none.

    Raises:
        DoctorError: the file is not TOML, or a key or a value of the table is wrong.
    """
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    for one in (folder, *folder.parents):
        found = one / "pyproject.toml"
        if found.is_file():
            return _read(found)
    return DoctorSettings()


def _read(path: Path) -> DoctorSettings:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise DoctorError(f"{path} is not TOML that can be read: {error}; mend the file") from None
    table = document.get("tool", {}).get("regard", {}).get("doctor", {})
    where = f"[tool.regard.doctor] of {path}"
    if not isinstance(table, dict):
        raise DoctorError(f"{where} is {table!r}; it needs to be a table")
    return DoctorSettings(**{key.replace("-", "_"): _checked(key, value, where) for key, value in table.items()})


def _checked(key: str, value: Any, where: str) -> Any:
    """The value of one setting."""
    match key:
        case "min-severity":
            return severity_named(value, where)
        case "documentation":
            return check_documentation(value, where=where)
        case "per-file-ignores":
            return _per_file(value, where)
    if key not in _KEYS:
        raise DoctorError(f"{where} has the unknown key {key!r}; {nearest(key, _KEYS)}")
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise DoctorError(f"{key} in {where} is {value!r}; it needs to be a list of strings")
    return tuple(value) if key == "exclude" else check_codes(tuple(value), where)


def _per_file(value: object, where: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if not isinstance(value, dict) or not all(isinstance(codes, list) for codes in value.values()):
        raise DoctorError(
            f'per-file-ignores in {where} is {value!r}; it needs to be a table such as {{"tests/*" = ["ATT9"]}}'
        )
    return tuple((pattern, check_codes(tuple(codes), where)) for pattern, codes in value.items())


def severity_named(name: object, where: str) -> Severity:
    """The severity of that name.

    Raises:
        DoctorError: there is none.
    """
    names = {severity.value: severity for severity in Severity}
    if not isinstance(name, str) or name not in names:
        raise DoctorError(f"unknown severity {name!r} in {where}; {nearest(str(name), names)}")
    return names[name]


def check_codes(codes: tuple[str, ...], where: str) -> tuple[str, ...]:
    """The codes, each that of a rule, or the beginning of one.

    Raises:
        DoctorError: no rule has a code that begins so.
    """
    for code in codes:
        if not code or not any(known.startswith(code) for known in RULES):
            raise DoctorError(f"unknown code {code!r} in {where}; {nearest(code, RULES)}")
    return codes
