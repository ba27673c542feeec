"""Which devices Vulkan can draw with, asked of its loader directly: SAPIEN ends the process where there is none."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

OLDEST_MESA = (23, 1)  # older software renderers lack extensions that SAPIEN asks for
REMEDY = (
    "install mesa-vulkan-drivers 23.1 or newer (software rendering: on Debian 12 from bookworm-backports, elsewhere "
    "apt-get install mesa-vulkan-drivers), or a GPU's Vulkan driver; bash scripts/setup.sh does the first where it may"
)

_INSTANCE_CREATE_INFO = 1  # VkStructureType
_CPU = 4  # VkPhysicalDeviceType


@dataclass(frozen=True, slots=True)
class VulkanDevice:
    """A GPU, or a software renderer."""

    name: str
    software: bool
    driver: tuple[int, int, int]  # Mesa's version where it is Mesa's

    @property
    def usable(self) -> bool:
        return not self.software or self.driver[:2] >= OLDEST_MESA

    def __str__(self) -> str:
        version = ".".join(map(str, self.driver))
        return f"{self.name}, software, Mesa {version}" if self.software else self.name


class _InstanceInfo(ctypes.Structure):
    """VkInstanceCreateInfo."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.c_void_p),
        ("layer_count", ctypes.c_uint32),
        ("layers", ctypes.c_void_p),
        ("extension_count", ctypes.c_uint32),
        ("extensions", ctypes.c_void_p),
    ]


class _Properties(ctypes.Structure):
    """The beginning of VkPhysicalDeviceProperties, and room for the rest."""

    _fields_ = [
        ("api_version", ctypes.c_uint32),
        ("driver_version", ctypes.c_uint32),
        ("vendor", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("type", ctypes.c_int),
        ("name", ctypes.c_char * 256),
        ("rest", ctypes.c_uint64 * 256),
    ]


def vulkan_devices() -> list[VulkanDevice] | None:
    """The devices that the Vulkan loader offers, software renderers included; None where there is no loader."""
    try:
        vulkan = ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return None
    pointer, number = ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint32)
    vulkan.vkCreateInstance.argtypes = [ctypes.POINTER(_InstanceInfo), pointer, ctypes.POINTER(pointer)]
    vulkan.vkDestroyInstance.argtypes = [pointer, pointer]
    vulkan.vkEnumeratePhysicalDevices.argtypes = [pointer, number, ctypes.POINTER(pointer)]
    vulkan.vkGetPhysicalDeviceProperties.argtypes = [pointer, ctypes.POINTER(_Properties)]
    instance = pointer()
    info = _InstanceInfo(type=_INSTANCE_CREATE_INFO)
    if vulkan.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance)) != 0:
        return []
    try:
        count = ctypes.c_uint32(0)
        if vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None) != 0:
            return []
        handles = (pointer * count.value)()
        if vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles) != 0:
            return []
        return [_describe(vulkan, handle) for handle in handles[: count.value]]
    finally:
        vulkan.vkDestroyInstance(instance, None)


def _describe(vulkan: ctypes.CDLL, handle: int | None) -> VulkanDevice:
    found = _Properties()
    vulkan.vkGetPhysicalDeviceProperties(handle, ctypes.byref(found))
    version = found.driver_version
    driver = (version >> 22, (version >> 12) & 0x3FF, version & 0xFFF)
    return VulkanDevice(found.name.decode(errors="replace"), found.type == _CPU, driver)


def vulkan_problem() -> str:
    """What keeps SAPIEN from drawing, with the remedy; empty where nothing does."""
    devices = vulkan_devices()
    if devices is None:
        return f"no Vulkan loader (libvulkan.so.1): {REMEDY}"
    if any(device.usable for device in devices):
        return ""
    found = "; ".join(map(str, devices)) or "none"
    return f"no Vulkan device that SAPIEN can draw with (found: {found}): {REMEDY}"
