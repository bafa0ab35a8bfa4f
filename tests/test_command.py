"""`python -m ipu_log_callback` says something useful."""

import subprocess
import sys

import pytest

from ipu_log_callback.__main__ import main


def test_the_help_shows_the_callback_and_the_programs(capsys):
    """Without arguments too: who types the package's name wants to know what to type next."""
    main([])
    told = capsys.readouterr().out
    for part in ("IPULogCallback(keys=", "ipu_log_callback.doctor", "ipu_log_callback.emulator"):
        assert part in told


def test_the_packages_name_is_a_program():
    """`python -m ipu_log_callback` is what the help is for."""
    done = subprocess.run(
        [sys.executable, "-m", "ipu_log_callback"], capture_output=True, text=True, check=True
    )
    assert "IPULogCallback(keys=" in done.stdout


def test_the_version_names_what_a_report_needs(capsys):
    """This package, Lightning, torch, Python, and whether PopTorch is there."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for name in ("ipu-log-callback", "torch ", "pytorch-lightning", "poptorch", "Python"):
        assert name in told
