"""docs/write-a-backend.md, followed to the letter: its files are written, its commands run, in an empty folder."""

from __future__ import annotations

import re
import shlex

from third_party import ROOT

PAGE = ROOT / "docs" / "write-a-backend.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def steps() -> list[tuple[str, str]]:
    """(file name, content) and ("", command) of the page, in its order."""
    found = []
    for language, text in _BLOCK.findall(PAGE.read_text()):
        if language in ("toml", "python"):
            name, _, content = text.partition("\n")
            found.append((name.removeprefix("# "), content))
        elif language == "sh":
            found += [("", line) for line in text.splitlines() if line]
    return found


def test_every_file_and_command_of_the_page_works(installed, tmp_path):
    outputs = {}
    for name, text in steps():
        if name:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
            continue
        command, _, remark = map(str.strip, text.partition("#"))
        if remark != "setup":  # the environment is there already
            status = int(remark.removeprefix("exit code ")) if remark else 0
            outputs.setdefault(command, installed.run(*shlex.split(command), status=status, cwd=tmp_path).stdout)
    assert "cpu_ref: available" in outputs["deepinfer backends"]
    assert "33 ops, 0 native, 33 inherited" in outputs["deepinfer backends --ops acme"]
    failing = outputs["deepinfer conformance --backend acme --ops rms_norm"]
    excerpt = next(text for language, text in _BLOCK.findall(PAGE.read_text()) if language == "text")
    assert excerpt.strip() in failing
    assert (tmp_path / "report.md").exists()
