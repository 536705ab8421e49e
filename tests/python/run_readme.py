"""Runs the Python examples of a README as they are printed, each in a process and a folder of its own.

Usage: run_readme.py README FOLDER. A block counts as an example if it begins with a line `# NAME.py`; one that begins with
`# NAME.py, again` runs in the same folder as NAME did."""
import pathlib
import re
import subprocess
import sys

readme, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
blocks = re.findall(r'```python\n(# (\w+\.py)(, again)?\n.*?)```', readme.read_text(encoding='utf-8'), re.S)
if not blocks:
    sys.exit(f'{readme}: no example found; expected ```python blocks that begin with "# NAME.py"')
for text, name, again in blocks:
    place = folder / name.removesuffix('.py')
    if again and not place.is_dir():
        sys.exit(f'{name} comes again before its first time')
    place.mkdir(parents=True, exist_ok=bool(again))
    (place / name).write_text(text, encoding='utf-8')
    print(f'{name}{again}:', flush=True)
    subprocess.run([sys.executable, name], cwd=place, check=True, timeout=600)
