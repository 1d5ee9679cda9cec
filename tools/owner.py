"The owner stands in settings.ini alone: `python -m tools.owner` writes it into badges, links and install cells."

import re
from pathlib import Path

from nbdev.config import get_config

ROOT = Path(__file__).resolve().parent.parent
OTHERS = ("_quarto.yml", "CITATION.cff", "CHANGELOG.md", "tools/chapter.txt")


def files(root: Path = ROOT) -> list[Path]:
    "Every file with an address of the repository or its site that no other tool writes."
    notebooks = [f for f in root.glob("nbs/**/*.ipynb") if ".ipynb_checkpoints" not in f.parts]
    return [*sorted(notebooks), *(root / name for name in OTHERS)]


def renamed(text: str, user: str, repo: str, branch: str) -> str:
    "The text with every address of `repo`, whoever owned it, made `user`'s: on GitHub, in Colab, raw files, the site."
    name = re.escape(repo)
    text = re.sub(rf"((?:github|raw\.githubusercontent)\.com/|/github/)[\w.-]+/{name}\b", rf"\g<1>{user}/{repo}", text)
    named_branch = rf"(/{user}/{name}/blob/|raw\.githubusercontent\.com/{user}/{name}/)[\w.-]+/"
    text = re.sub(named_branch, rf"\g<1>{branch}/", text)
    return re.sub(rf"https://[\w-]+\.github\.io/{name}\b", f"https://{user}.github.io/{repo}", text)


def write(root: Path = ROOT) -> list[Path]:
    "Mend the addresses in every file of `files`; gives those that changed."
    cfg, changed = get_config(), []
    for file in files(root):
        text = file.read_text(encoding="utf-8")
        if (mended := renamed(text, cfg.user, cfg.repo, cfg.branch)) != text:
            file.write_text(mended, encoding="utf-8")
            changed.append(file)
    return changed


if __name__ == "__main__":
    for file in write():
        print(file.relative_to(ROOT))
