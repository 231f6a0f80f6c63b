# SPDX-License-Identifier: Apache-2.0
"""A release with an RFC's patch, beside the one that is installed.

`python -m tests.rfc.patched PATCH FOLDER` makes in FOLDER a copy of the package that PATCH names,
of links to the installed files but for those that the patch changes, and applies the patch to it.
With FOLDER first on the path the patched package is imported; the installation stays as it is.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path


def changed(patch: Path) -> list[Path]:
    """The files that a patch changes or makes."""
    return [Path(name) for name in re.findall(r"^\+\+\+ b/(\S+)$", patch.read_text(), re.MULTILINE)]


def make(patch: Path, folder: Path) -> None:
    """Make `folder`, anew; a patch that does not apply ends the program."""
    files = changed(patch)
    package = files[0].parts[0]
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        sys.exit(f"{package} is not installed here")
    shutil.rmtree(folder, ignore_errors=True)
    installed = Path(found.submodule_search_locations[0])
    shutil.copytree(
        installed,
        folder / package,
        copy_function=os.symlink,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for file in files:
        target = folder / file
        if target.exists():
            original = target.resolve()
            target.unlink()
            shutil.copyfile(original, target)
    # The folder may lie in a repository, whose root git would take the names to be relative to.
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "apply", "--verbose", str(patch)]
    done = subprocess.run(command, cwd=folder, env=outside, capture_output=True, text=True)
    applied = done.stderr.count("Applied patch ")
    if done.returncode or applied != len(files):
        sys.exit(f"{patch.name} does not apply to the {package} that is installed:\n{done.stderr}")


if __name__ == "__main__":
    make(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute())
