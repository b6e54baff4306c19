"""Rounds without a server: `sites` joins the ranks of a process group, one of each site, and `client` performs the
outer step at every site, on submissions that the group gathers.
"""

from onstep.diloco.group.sites import Sites, divide_into_sites

__all__ = ["Sites", "divide_into_sites"]
