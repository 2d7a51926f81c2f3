"""Only the long description: README.md with addresses for its links; everything else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/niwaki/niwaki"
PICTURE = re.compile(r'(\]\(|\b(?:src|srcset)=")(docs/figures/)')
LINK = re.compile(r"(\]\()(?!\w+:|#)")

text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
text = PICTURE.sub(rf"\1{REPOSITORY}/raw/main/\2", text)
setup(long_description=LINK.sub(rf"\1{REPOSITORY}/blob/main/", text), long_description_content_type="text/markdown")
