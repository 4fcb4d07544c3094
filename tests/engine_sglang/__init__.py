"""Tests against a real SGLang; see ``install.sh``. Not part of CI."""

import sys
import types

# torchvision's compiled part needs CUDA; transformers loads the rest of it.
_REGISTRATIONS = "torchvision._meta_registrations"
sys.modules[_REGISTRATIONS] = types.ModuleType(_REGISTRATIONS)
