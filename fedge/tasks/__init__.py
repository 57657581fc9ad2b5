"""Tasks: what is learned, a device's data, and partitions of data sets over simulated devices."""

from fedge.tasks.data import DeviceData, UserTask
from fedge.tasks.device import device_data, device_inputs, labelled
from fedge.tasks.own import Task
from fedge.tasks.partition import partition, set_apart
from fedge.tasks.pool import Pool, pool
from fedge.tasks.shares import Partitioning, Share, share_data, write_share
from fedge.tasks.specs import task_spec, write_task

__all__ = [
    "DeviceData",
    "Partitioning",
    "Pool",
    "Share",
    "Task",
    "UserTask",
    "device_data",
    "device_inputs",
    "labelled",
    "partition",
    "pool",
    "set_apart",
    "share_data",
    "task_spec",
    "write_share",
    "write_task",
]
