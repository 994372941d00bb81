"""Python imports this first in the processes that tests start: they get the fault, too."""

import os

if "TRIFORCE_FAULT" in os.environ:
    from faults import FAULTS
    from hooks import install

    install(next(fault for fault in FAULTS if fault.id == os.environ["TRIFORCE_FAULT"]))
