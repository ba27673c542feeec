#!/usr/bin/env bash
# What a release consists of: sdist and wheel of the commit that is checked out. The wheel is built from the sdist,
# installed into an empty environment, and tried in an empty folder. Nothing is uploaded, and no tag is set.
#   bash scripts/release.sh [FOLDER]     default: dist
#   PYTHON=PATH    an interpreter that has setuptools; default: that of .venv
#   LIMIT_MIB=50   it fails if the wheel is larger
#   WITH=PATH      a folder of packages that the environment also sees, so that only vla_rl is installed there; without
#                  it, pip installs the dependencies from the package index (some GiB). check_install.sh then runs more.
# The wheel is large because of checkpoints/: see "Release" in CONTRIBUTING.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=$(realpath -m "${1:-dist}")
python=${PYTHON:-$PWD/.venv/bin/python}
unset PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) # the same commit gives the same wheel
export SOURCE_DATE_EPOCH

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }

fail() {
    printf 'release: %s\n' "$@" >&2
    exit 1
}

[ -z "$(git status --porcelain)" ] || fail "the working tree has changes or new files; commit them first, or put them away"
"$python" -c 'import setuptools.build_meta' || fail "$python lacks setuptools: bash scripts/setup.sh, or PYTHON=PATH names another"
work=$(mktemp -d -t vla_rl-release-XXXX)
trap 'rm -rf "$work"' EXIT
mkdir "$work/source" "$work/empty"

say "building sdist and wheel of $(git rev-parse --short HEAD)"
git archive HEAD | tar -x -C "$work/source"
(cd "$work/source" && "$python" -c "from setuptools.build_meta import build_sdist; build_sdist('$work')" >"$work/log" 2>&1) ||
    fail "no sdist could be built:" "$(tail -n 20 "$work/log")"
sdist=$(ls "$work"/vla_rl-*.tar.gz)
"$python" -m pip wheel --quiet --no-deps --no-build-isolation -w "$work" "$sdist"
wheel=$(ls "$work"/vla_rl-*.whl)
if "$python" -c 'import twine' 2>/dev/null; then
    "$python" -m twine check "$sdist" "$wheel"
else
    say "twine is not installed: it has not checked the metadata"
fi

"$python" - "$wheel" "${LIMIT_MIB:-50}" <<'PY' || fail "the wheel is too large; LIMIT_MIB raises the limit"
import sys
import zipfile
from pathlib import Path

wheel, limit = Path(sys.argv[1]), float(sys.argv[2])
files = sorted(zipfile.ZipFile(wheel).infolist(), key=lambda file: -file.compress_size)
size = wheel.stat().st_size / 2**20
print(f"{wheel.name}: {size:.1f} MiB of at most {limit:g}, {len(files)} files. The ten largest, in MiB, packed and unpacked:")
for file in files[:10]:
    print(f"{file.compress_size / 2**20:6.2f} {file.file_size / 2**20:6.2f}  {file.filename}")
shipped = sum(file.compress_size for file in files if "/shipped/checkpoints/" in file.filename) / 2**20
print(f"{shipped:6.2f}         all of checkpoints/")
sys.exit(size > limit)
PY

say "installing the wheel into an empty environment"
"$python" -m venv "$work/environment"
own=$work/environment/bin/python
[ -z "${WITH:-}" ] || echo "$WITH" >"$("$own" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/with.pth"
"$own" -m pip install --quiet ${WITH:+--no-deps} "$wheel"
cd "$work/empty"
[[ $("$own" -c 'import vla_rl; print(vla_rl.__file__)') == "$work/environment/"* ]] || fail "another vla_rl is imported"
"$work/environment/bin/vla-rl" --help >help.txt
"$work/environment/bin/vla-rl" list >list.txt
grep -q libero_ppo list.txt || fail "vla-rl list does not show the config libero_ppo"

mkdir -p "$folder"
cp "$sdist" "$wheel" "$folder"
say "vla-rl --help and vla-rl list work; $folder has $(basename "$sdist") and $(basename "$wheel")"
