"""The four networks. Modules hold weights only; every state is a value outside them (see ``state``)."""
