"""A site's edge server: a device to the coordinator above, a coordinator to the devices below."""
