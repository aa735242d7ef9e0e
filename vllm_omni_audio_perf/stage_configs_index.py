# SPDX-License-Identifier: Apache-2.0
"""Finds the stage-config YAMLs that are installed with the package."""

from pathlib import Path

# In a checkout this is a link to the top-level stage_configs/, in a wheel a folder.
_FOLDER = Path(__file__).parent / "stage_configs"


def list_stage_configs() -> list[tuple[str, str]]:
    """List the installed stage configs.

    Returns:
        `(name, description)` pairs in order of name. The description is the YAML's first comment line, or "" where
        it has none.
    """
    return [(name, _description(path)) for name, path in _paths_by_name().items()]


def stage_config_path(name: str) -> Path:
    """Find an installed stage config.

    Args:
        name: the YAML's name, with or without `.yaml`.

    Returns:
        Its absolute path, as `Omni(deploy_config=...)` and `--deploy-config` take it.

    Raises:
        ValueError: there is no stage config of that name. The message lists the names there are.
    """
    paths = _paths_by_name()
    path = paths.get(name.removesuffix(".yaml"))
    if path is None:
        raise ValueError(f"no stage config is named {name!r}; the names are: {', '.join(paths) or '(none installed)'}")
    return path


def _paths_by_name() -> dict[str, Path]:
    return {path.stem: path for path in sorted(_FOLDER.resolve().glob("*.yaml"))}


def _description(path: Path) -> str:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and "SPDX-License-Identifier" not in line:
            return line.lstrip("# ").rstrip()
    return ""
