"""Cases on several processes of this machine, or on the workers of a Ray cluster."""

from conformance.distribute.calls import Settings
from conformance.distribute.cluster import ClusterError
from conformance.distribute.labels import LabelError
from conformance.distribute.run import Declared

__all__ = ["ClusterError", "Declared", "LabelError", "Settings"]
