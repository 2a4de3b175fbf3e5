"""The versions of PyTorch that the package was tested with, for the files of this room."""

from torchremat.tested_versions import NEWEST as NEWEST
from torchremat.tested_versions import OLDEST as OLDEST
from torchremat.tested_versions import is_newer as is_newer
from torchremat.tested_versions import warn_of_newer as warn_of_newer
from torchremat.tested_versions import warn_once_of_newer as warn_once_of_newer
