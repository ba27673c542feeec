"""`vla-rl watch`: a run from another terminal, by the files of its folder. No process is asked, nothing is written."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel

from vla_rl.config.yaml_file import read_config_file
from vla_rl.core.errors import UserError
from vla_rl.core.file_lock import FileLock
from vla_rl.core.files import json_or_empty
from vla_rl.observability.console import make_console, say
from vla_rl.observability.heartbeat import duration
from vla_rl.observability.metrics_file import RecordTail
from vla_rl.observability.panel import RunPicture

_POLL_S = 1.0


def watch_command(args: Any) -> int:
    """The panel in a terminal, the lines of new iterations elsewhere; until the run is over, or Ctrl-C."""
    run, console = WatchedRun(args.run), make_console()
    if args.once:
        run.read()
        console.print(run.panel(console.width))
        return 0
    with suppress(KeyboardInterrupt):  # the run is somebody else's, and goes on
        _watch(run, console, follow=args.follow)
    return 0


# consumes: records of metrics.jsonl. waits for: the next one. unblocked by: its pause, the end of the run, Ctrl-C.
def _watch(run: "WatchedRun", console: Console, *, follow: bool) -> None:
    live = Live(console=console, auto_refresh=False)
    if console.is_terminal:
        live.start()
    try:
        while True:
            lines = run.read()
            if console.is_terminal:
                live.update(run.panel(console.width), refresh=True)
            else:
                for line in lines:
                    say(console, line)
            if not (run.is_running or follow):
                break
            time.sleep(_POLL_S)
    finally:
        live.stop()
    if not console.is_terminal:
        say(console, run.status())


class WatchedRun:
    """What the folder of a run tells of it."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError if it is none."""
        self._folder = folder
        self._config, self._lock = folder / "config.yaml", folder / "lock"
        if not self._config.is_file():
            raise UserError(f"{folder}: no run folder, {self._config} does not exist; name a folder below runs/")
        self._tail = RecordTail(folder / "metrics.jsonl")
        self._picture = RunPicture(str(folder), 0)
        self._config_time = 0.0
        self.is_running = False  # at the last ``read``

    def read(self) -> list[str]:
        """A line for each iteration that has been logged since the last call. Raises UserError."""
        try:
            self._read_config()
            self.is_running = FileLock.is_held(self._lock)  # first: what is read next is then complete if it is over
        except OSError as error:
            raise UserError(f"{self._folder} cannot be read: {error}") from None
        lines = []
        for record in self._tail.read():
            self._picture.add(record)
            lines.append(self._picture.line())
        return lines

    def _read_config(self) -> None:
        """Again after a resume, which may have changed it."""
        if (changed := self._config.stat().st_mtime) == self._config_time:
            return
        self._config_time, values = changed, read_config_file(self._config).values
        try:
            self._picture.iterations = int(values["train"]["iterations"])
            algo, env, mode = values["algo"]["name"], values["env"]["name"], values["mode"]
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{self._config} is not the config of a run: it does not name all keys") from None
        simulator = json_or_empty(self._folder / "metadata.json").get("simulator", env)
        self._picture.title = f"{algo.upper()} on {simulator}, {mode}: {self._folder}"

    def panel(self, width: int) -> Panel:
        """As a terminal of so many columns shows the run itself."""
        return self._picture.panel(width, self.status(), self._age_s() if self.is_running else 0.0)

    def _age_s(self) -> float:
        """Of the newest figures, in seconds."""
        return max(0.0, time.time() - self._picture.figures.get("time", time.time()))

    def status(self) -> str:
        """Whether the run goes on, as ``stage: details``."""
        if self.is_running:
            figures = f"figures of {duration(self._age_s())} ago" if self._picture.figures else "no figures yet"
            return f"running, {figures}: {self._owner()}"
        if self._picture.iteration >= self._picture.iterations:
            return "complete"
        return f"not running, and not complete: vla-rl train --resume {self._folder}"

    def _owner(self) -> str:
        try:
            return self._lock.read_text(errors="replace")
        except OSError:  # it has just ended
            return "about to end"
