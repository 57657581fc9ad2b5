"""Tasks: their descriptions, a device's data, and partitions of data sets over simulated devices."""

from fedge.system.moved import alias_names
from fedge.tasks.data import DeviceData, UserTask
from fedge.tasks.device import read_device_data, read_device_inputs, read_labelled, read_parts
from fedge.tasks.own import Task
from fedge.tasks.partition import partition_pool, set_apart
from fedge.tasks.pool import Pool, load_pool
from fedge.tasks.shares import Partitioning, Share, make_device_data, write_share
from fedge.tasks.specs import load_task, write_task

__all__ = [
    "DeviceData",
    "Partitioning",
    "Pool",
    "Share",
    "Task",
    "UserTask",
    "load_pool",
    "load_task",
    "make_device_data",
    "partition_pool",
    "read_device_data",
    "read_device_inputs",
    "read_labelled",
    "read_parts",
    "set_apart",
    "write_share",
    "write_task",
]


__getattr__ = alias_names(__name__, task_spec="load_task")
