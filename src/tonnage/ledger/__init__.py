"""Who holds what on one device, now and at its highest, and in which phase.

One ``Ledger`` per device, made by whoever opens the device and passed in; there is no global one. It keeps accounts,
not allocations. Each account says how its bytes are known: COUNTED by our own allocators, SAMPLED from someone
else's statistics, or assigned by whoever opened the device from what was left unexplained at one moment (REMAINDER).
What the device says this process holds, minus all accounts on it, is ``unattributed``: reported as it is, negative
values too.
"""

from tonnage.ledger.account import Account
from tonnage.ledger.audit import AuditRow
from tonnage.ledger.journal import DEFAULT_NUM_EVENTS, FIRST_PHASE
from tonnage.ledger.ledger import OTHERS, Ledger

__all__ = ["DEFAULT_NUM_EVENTS", "FIRST_PHASE", "OTHERS", "Account", "AuditRow", "Ledger"]
