"""A site's edge server: a device to the coordinator above, a coordinator to the devices below.

`site` carries out orders by asking the site's devices, `cli` is `fedge relay`. Begin with `site`.
"""
