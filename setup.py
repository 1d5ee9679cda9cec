"Packaging, read from settings.ini, so that every fact about the project stands once."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

config = ConfigParser(delimiters=["="])
config.read(Path(__file__).parent / "settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]
needs = {extra: cfg[f"{extra}_requirements"].split() for extra in ("train", "book", "live", "site", "dev")}
needs["book"] = needs["train"] + needs["book"]
needs["dev"] = needs["book"] + needs["live"] + needs["site"] + needs["dev"]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    url=cfg["git_url"],
    author=cfg["author"],
    author_email=cfg["author_email"],
    license="Apache-2.0",
    keywords=cfg["keywords"].split(),
    classifiers=[
        "Development Status :: 3 - Alpha",
        f"Intended Audience :: {cfg['audience']}",
        f"Natural Language :: {cfg['language']}",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=find_packages(include=["annotated_nlp", "annotated_nlp.*"]),
    package_data={"annotated_nlp": ["py.typed", "assets/*/*", "results/*.json", "hub/weights/*/*"]},
    install_requires=cfg["requirements"].split(),
    extras_require=needs,
    python_requires=f">={cfg['min_python']}",
    zip_safe=False,
)
