"""What an agent says and hears as its device.

`voice` queues what it says, and is silent while another process speaks as the device; `ears` opens what comes in.
"""
