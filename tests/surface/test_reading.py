"""The reading list is true: the files are there, few enough, and the same in both places."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES = 2000


def listed() -> list[str]:
    """The files of the list in docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- reading list -->(.*)<!-- end -->", text, re.DOTALL)
    assert found is not None
    return re.findall(r"`(shardwise/[\w/]+\.py)`", found.group(1))


def test_a_parameter_is_followed_in_less_than_so_many_lines() -> None:
    files = listed()
    assert len(files) > 8
    lines = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files}
    assert sum(lines.values()) <= MOST_LINES, lines


def test_readme_names_the_same_files() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = readme[readme.index("To understand") : readme.index("## What works today")]
    named = re.findall(r"`((?:plans|runtime)/[\w/]+\.py)`", " ".join(text.split()))
    about_plans = {"plans/plan.py", "plans/presets.py"}
    assert [f"shardwise/{name}" for name in named if name not in about_plans] == listed()


def test_every_file_that_the_walk_names_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:plans|runtime|core|tests)/[\w/]+\.py)`", text):
        assert (ROOT / name).exists() or (ROOT / "shardwise" / name).exists(), name
