"""Where the roles run: in the controller's process (`local`), or on ranks that Ray starts (`ray`).

`place_roles` turns a config into roles with the same methods either way, so the loop is the same code for both.
"""

from pellucid.ranks.local import LocalPlacement, Placement
from pellucid.ranks.place import place_roles

__all__ = ["LocalPlacement", "Placement", "place_roles"]
