#!/usr/bin/env bash
# Makes the environment in .venv once; later starts only check that it is still valid. Needs Debian or Ubuntu with
# Python 3.11 or 3.12. Installs missing system packages if this user may; otherwise prints the command that does.
#   bash scripts/setup.sh [--test] [--no-system] [--cuda 12|13]     PYTHON=/path/to/python3 names the interpreter
# --test adds what only the tests and linters need. --no-system, or VLA_RL_NO_SYSTEM=1, never installs system packages.
# --cuda names the major version of CUDA that torch is built for; without it, the NVIDIA driver decides. Later starts keep
# the choice.
# Writes into .venv and into VLA_RL_CACHE (default ~/.cache/vla_rl). Exit status 2: something that the user can fix.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

test_tools=""
cuda=""
while [ $# -gt 0 ]; do
    case $1 in
        --test) test_tools=yes ;;
        --no-system) VLA_RL_NO_SYSTEM=1 ;;
        --cuda)
            cuda=${2:-}
            [[ $cuda == 1[23] ]] || { printf 'setup: --cuda takes 12 or 13\n' >&2 && exit 2; }
            shift
            ;;
        *) printf 'setup: %s is not an option; there are --test, --no-system and --cuda\n' "$1" >&2 && exit 2 ;;
    esac
    shift
done
readonly venv=.venv
readonly cuda_choice=$venv/vla_rl-cuda # the major version of CUDA, as asked for or by the driver
readonly packages=$venv/requirements.txt # requirements.txt, with the release of torch for that version
readonly test_stamp=$venv/vla_rl-test-tools # the hash of their list
readonly newer_mujoco=$venv/newer_mujoco
readonly stamp=$venv/vla_rl-complete # the fingerprint, written last
readonly unfinished=$venv/vla_rl-unfinished
readonly renderer=$venv/vla_rl-renderer # the settings with which an off-screen renderer was found
readonly vulkan=$venv/vla_rl-vulkan     # written after the search for a Vulkan driver, whether or not it found one
readonly log=$venv/setup.log
export PIP_CACHE_DIR=${PIP_CACHE_DIR:-${VLA_RL_CACHE:-$HOME/.cache/vla_rl}/pip}
export PIP_CONSTRAINT="$packages requirements-test.txt" # also for what builds a package from source
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off

say() { printf '[%3d s] %s\n' "$SECONDS" "$*"; }

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 2
}

# run TITLE COMMAND...: output goes to the log; every 10 s a line reports progress; a failure shows the end of the log.
run() {
    local title=$1 next=$((SECONDS + 10))
    shift
    say "$title"
    "$@" >>"$log" 2>&1 </dev/null &
    child=$!
    trap 'kill "$child" 2>/dev/null || true' EXIT
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.2
        if [ "$SECONDS" -ge "$next" ]; then
            next=$((SECONDS + 10))
            say "  $(find "$venv"/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' 2>/dev/null | wc -l) packages" \
                "in place; now: $(tail -n 1 "$log" | sed 's/^ *//' | cut -c 1-80)"
        fi
    done
    trap - EXIT
    if ! wait "$child"; then
        tail -n 25 "$log" >&2
        fail "this step failed: $title" "its full output is in $log; the next start repairs what is incomplete"
    fi
}

may_install() { [ -z "${VLA_RL_NO_SYSTEM:-}" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

# system_package WHAT PACKAGE: installs a Debian package if this user may; otherwise prints the command and fails.
system_package() {
    if ! may_install; then
        fail "$1" "install it with: sudo apt-get update && sudo apt-get install -y $2"
    fi
    say "$1; installing the system package $2 (--no-system never does)"
    apt_install "$2" 2>/dev/null || { apt-get -qq update && apt_install "$2"; } ||
        fail "apt-get cannot install $2: fix the problem that it reports above, and start again"
}

apt_install() { DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" </dev/null >/dev/null; }

# Prints the first Python 3.11 or 3.12, preferring one that can make environments.
find_python() {
    local candidate version bare=""
    for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
        version=$("$candidate" -I -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        case $version in 3.11 | 3.12) ;; *) continue ;; esac
        if "$candidate" -I -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$candidate"
            return
        fi
        bare=${bare:-$candidate $version}
    done
    if [ -n "$bare" ]; then
        system_package "${bare% *} has no venv module" "python${bare#* }-venv" >&2
        echo "${bare% *}"
        return
    fi
    fail "no Python 3.11 or 3.12 among: ${PYTHON:-python3.11 python3.12 python3 python}" \
        "install one with: sudo apt-get update && sudo apt-get install -y python3 python3-venv (Debian 12, Ubuntu 24.04)," \
        "or name one: PYTHON=/path/to/python3.12 bash scripts/setup.sh" \
        "where the system has an older one (Ubuntu 22.04 has 3.10), uv brings its own, without root:" \
        "  python3 -m pip install --user uv && python3 -m uv python install 3.12" \
        "  PYTHON=\$(python3 -m uv python find 3.12) bash scripts/setup.sh"
}

# The major version of CUDA that torch is to be built for: as asked for, else as remembered, else by the NVIDIA driver;
# nothing without one.
cuda_version() {
    local driver
    if [ -n "$cuda" ] || [ -f "$cuda_choice" ]; then
        echo "${cuda:-$(<"$cuda_choice")}"
        return
    fi
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d . -f 1) || true
    if [[ $driver =~ ^[0-9]+$ ]]; then
        if [ "$driver" -ge 525 ] && [ "$driver" -lt 580 ]; then echo 12; else echo 13; fi
    fi
}

requirements() {
    if [ "$cuda" = 12 ]; then
        grep -v '^torch==' requirements.txt
        cat requirements-cuda12.txt
    else
        cat requirements.txt
    fi
}

# Hash of what the environment is made from: interpreter, path, requirements, and the functions that make it. Empty
# without a working interpreter.
fingerprint() {
    local version
    version=$("$venv/bin/python" -I -S -c 'import sys; print(sys.version)' 2>/dev/null) || return 0
    {
        printf '%s\n' "$version" "$(pwd -P)"
        requirements
        cat setup.py
        declare -f make_environment compile_installed
    } | sha256sum
}

complete() { [ -f "$stamp" ] && [ "$(<"$stamp")" = "$(fingerprint)" ]; }

# Incomplete, of another Python version, or moved here from elsewhere (scripts name their interpreter by its full path).
beyond_repair() {
    [ -e "$unfinished" ] || [ -z "$(fingerprint)" ] || ! grep -qsF "$(pwd -P)/$venv/bin/python" "$venv/bin/pip" ||
        ! "$venv/bin/python" -I -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'
}

make_environment() {
    local python
    if beyond_repair; then
        python=$(find_python)
        say "making $venv with $("$python" --version); this happens once and takes some minutes"
        if [ -L "$venv" ]; then rm "$venv"; fi # what a link leads to belongs to somebody else
        rm -rf "$venv/bin" "$venv" # the interpreter first: without it, a half-removed environment is recognized
        mkdir "$venv"
        touch "$unfinished"
        run "creating the environment" "$python" -m venv "$venv"
    fi
    touch "$unfinished"
    rm -f "$stamp"
    requirements >"$packages"
    [ -z "$cuda" ] || echo "$cuda" >"$cuda_choice"
    local pip=("$venv/bin/python" -m pip install --no-compile) # compiles on one core; compile_installed uses all
    # All packages are pinned. --no-deps: some declare dependencies that nothing here imports and that break others (see
    # the file).
    run "installing $(grep -c '^[^#]' "$packages") packages" "${pip[@]}" --no-deps -r "$packages"
    run "adding what this build of torch needs" "${pip[@]}" torch
    run "installing vla_rl itself" "${pip[@]}" --no-deps --no-build-isolation -e .
    run "compiling Python's byte code" compile_installed
    run "checking the environment" "$venv/bin/python" -c 'import torch, ray, deepspeed, transformers, mujoco, vla_rl'
    fingerprint >"$stamp"
    rm "$unfinished"
    say "the environment is complete"
}

add_test_tools() {
    run "installing $(grep -c '^[^#]' requirements-test.txt) packages for the tests" \
        "$venv/bin/python" -m pip install --no-compile --no-deps -r requirements-test.txt
    # LIBERO is tested with a newer MuJoCo, too. It lies apart; PYTHONPATH puts it before the one of requirements.txt.
    rm -rf "$newer_mujoco"
    run "adding a newer MuJoCo for the tests" \
        env -u PIP_CONSTRAINT "$venv/bin/python" -m pip install --no-compile --no-deps --target "$newer_mujoco" mujoco==3.8.1
    sha256sum requirements-test.txt "$stamp" >"$test_stamp"
}

# A run starts many Python processes. Under PYTHONDONTWRITEBYTECODE (set in many container images), each of them would
# compile everything that it imports. Some packages contain files for other Python versions; their failures do no harm.
compile_installed() {
    "$venv/bin/python" -m compileall -j 0 "$venv"/lib/python*/site-packages vla_rl envs algos || true
}

# Prints what prevents MuJoCo from rendering off-screen; nothing if it can.
renderer_problem() {
    "$venv/bin/python" - <<'PY'
from envs.base import EnvError
from envs.base.mujoco_setup import select_gl_backend

try:
    select_gl_backend()
except EnvError as error:
    print(error)
PY
}

find_renderer() {
    local problem
    problem=$(renderer_problem)
    if [ -n "$problem" ] && [ -z "${MUJOCO_GL:-}${PYOPENGL_PLATFORM:-}" ]; then
        system_package "off-screen OpenGL is missing" libosmesa6
        problem=$(renderer_problem)
    fi
    [ -z "$problem" ] || fail "$problem"
}

vulkan_problem() { "$venv/bin/python" -c 'from envs.maniskill.vulkan import vulkan_problem; print(vulkan_problem())'; }

# torch is the build that pip's index offers; it may be one that the driver of a GPU does not support.
note_gpu_problem() {
    local problem
    problem=$("$venv/bin/python" -c 'from vla_rl.core.gpus import GpuReport; print(GpuReport.detect().problem)')
    [ -z "$problem" ] || say "note: the GPUs cannot be used, and training would run on the cores. $problem"
}

# Only ManiSkill draws with Vulkan: without a driver, the set-up continues and prints what is missing.
find_vulkan() {
    local problem
    problem=$(vulkan_problem)
    if [ -n "$problem" ] && may_install; then
        say "ManiSkill needs a Vulkan driver; installing the system package mesa-vulkan-drivers (--no-system never does)"
        if needs_backports; then
            say "  Debian 12's own is too old: adding its backports as a source, $backports"
        fi
        install_vulkan >>"$log" 2>&1 || true
        problem=$(vulkan_problem)
    fi
    [ -z "$problem" ] || say "note: all but ManiSkill is ready. ManiSkill: $problem"
}

readonly backports=/etc/apt/sources.list.d/vla_rl-backports.list

is_bookworm() { (. /etc/os-release && [ "${VERSION_CODENAME:-}" = bookworm ]); }

needs_backports() { is_bookworm && ! apt-cache policy | grep -q 'n=bookworm-backports'; }

# Debian 12's own package is too old for ManiSkill; its backports, on the mirror in use, have a newer one.
install_vulkan() {
    local package=mesa-vulkan-drivers
    apt-get -qq update || return 1
    if needs_backports; then
        apt-get indextargets --format 'deb $(REPO_URI) bookworm-backports main' \
            'Identifier: Packages' 'Codename: bookworm' 'Component: main' | head -n 1 >"$backports"
        apt-get -qq update || { rm "$backports" && return 1; }
    fi
    if is_bookworm; then
        package=$package/bookworm-backports # -t would also update OpenGL, and so change LIBERO's pixels
    fi
    apt_install "$package"
}

# Starts one episode. LIBERO's assets and what is compiled then are in the cache for all later processes.
play_first_steps() {
    "$venv/bin/python" - <<'PY'
from envs import make_env
from envs.base import empty_observation
from envs.libero.config import LiberoConfig
from vla_rl.core.records import EpisodeSpec

env = make_env(LiberoConfig(image_size=32), 1)
env.reset([0], [EpisodeSpec(id=0, task=0, seed=0)])
env.observe([0], empty_observation(env.spec, 1))
env.close()
PY
}

cuda=$(cuda_version)
if ! complete; then
    exec 9<scripts/setup.sh # one set-up at a time; the lock ends with the last process of this one
    flock -n 9 || { say "another set-up is under way here; waiting for it" && flock 9; }
    complete || make_environment
    note_gpu_problem
fi
if [ -n "$test_tools" ] && ! sha256sum --status -c "$test_stamp" 2>/dev/null; then
    add_test_tools
fi
settings="MUJOCO_GL=${MUJOCO_GL:-} PYOPENGL_PLATFORM=${PYOPENGL_PLATFORM:-}"
if [ "$(cat "$renderer" 2>/dev/null)" != "$settings" ]; then
    find_renderer
    run "starting LIBERO for the first time" play_first_steps
    echo "$settings" >"$renderer"
fi
if [ ! -f "$vulkan" ]; then
    find_vulkan
    touch "$vulkan"
fi
