"Print an extra's requirements from settings.ini: `python tools/needs.py site`."

import sys
from configparser import ConfigParser
from pathlib import Path

config = ConfigParser(delimiters=["="])
config.read(Path(__file__).resolve().parent.parent / "settings.ini", encoding="utf-8")
print(config["DEFAULT"][f"{sys.argv[1]}_requirements"])
