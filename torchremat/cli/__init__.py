"""The command `torchremat`: plans, reports, graphs and measurements without writing a script.
`app.py` lists the commands and their options, and imports PyTorch only when one runs. The room
may use every other, and none imports it. Begin with `app.py`, then `commands/`.

    torchremat plan model.py:make --budget 50%
    python -m torchremat residuals model.py:make --policy dots

>>> from click.testing import CliRunner
>>> result = CliRunner().invoke(main, ["plan", "--help"])
>>> result.exit_code, "--budget" in result.output
(0, True)
"""

from torchremat.cli.app import main as main
