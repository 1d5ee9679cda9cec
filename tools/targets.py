"What `make` alone prints: every target with its line. Runs on any Python, before anything is installed."

import re
from pathlib import Path

text = (Path(__file__).resolve().parent.parent / "Makefile").read_text(encoding="utf-8")
targets = re.findall(r"^([a-z-]+):[^#\n]*## ?(.*)$", text, re.MULTILINE)
width = max(len(name) for name, _ in targets)
for name, said in targets:
    print(f"  make {name:<{width}}  {said}")
