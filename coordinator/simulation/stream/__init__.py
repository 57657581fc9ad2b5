"""Simulations of a fleet that lives: campaign after campaign over samples that arrive and change.

`happenings` says what happens to whom and when, `arrivals` makes each device's samples and tests of a campaign,
`replay` is the devices' bounded store, `run` runs a method over all campaigns and measures it, `report` shows it.
"""
