"""What the pages of the project link to exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if not any(part.startswith(".") or part == "node_modules" for part in path.relative_to(ROOT).parts)
]


def title(page):
    return str(page.relative_to(ROOT))


def anchors(page):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        place, _, anchor = target.partition("#")
        linked = (page.parent / place).resolve() if place else page
        assert linked.exists(), target
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), target
