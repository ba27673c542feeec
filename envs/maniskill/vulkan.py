"""Asks the Vulkan loader which devices can draw. SAPIEN itself would end the process if there is none."""

import contextlib
import ctypes
import os
import re
from dataclasses import dataclass

OLDEST_MESA = (23, 1)  # older software renderers lack extensions that SAPIEN asks for
REMEDY = (
    "install mesa-vulkan-drivers 23.1 or newer (software rendering; on Debian 12: sudo apt-get install "
    "mesa-vulkan-drivers/bookworm-backports, with that source; elsewhere: apt-get install mesa-vulkan-drivers), or "
    "a GPU's Vulkan driver; bash scripts/setup.sh does the first if it has the rights"
)

_APPLICATION_INFO, _INSTANCE_CREATE_INFO = 0, 1  # values of VkStructureType
_PROPERTIES_2, _DRIVER_PROPERTIES = 1000059001, 1000196000
_VERSION_1_2 = (1 << 22) | (2 << 12)
_CPU = 4  # VkPhysicalDeviceType


@dataclass(frozen=True, slots=True)
class VulkanDevice:
    """A GPU, or a software renderer."""

    name: str
    software: bool
    driver: str  # as the driver reports it, such as "Mesa 25.0.7 (LLVM 15.0.6)"

    @property
    def usable(self) -> bool:
        mesa = re.match(r"Mesa (\d+)\.(\d+)", self.driver)
        return not self.software or mesa is None or (int(mesa[1]), int(mesa[2])) >= OLDEST_MESA

    def __str__(self) -> str:
        return f"{self.name}, {self.driver}" if self.driver else self.name


class _Application(ctypes.Structure):
    """VkApplicationInfo."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("version", ctypes.c_uint32),
        ("engine", ctypes.c_char_p),
        ("engine_version", ctypes.c_uint32),
        ("api_version", ctypes.c_uint32),
    ]


class _Instance(ctypes.Structure):
    """VkInstanceCreateInfo."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.POINTER(_Application)),
        ("layer_count", ctypes.c_uint32),
        ("layers", ctypes.c_void_p),
        ("extension_count", ctypes.c_uint32),
        ("extensions", ctypes.c_void_p),
    ]


class _Driver(ctypes.Structure):
    """VkPhysicalDeviceDriverProperties."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("id", ctypes.c_int),
        ("name", ctypes.c_char * 256),
        ("info", ctypes.c_char * 256),
        ("conformance", ctypes.c_uint8 * 4),
    ]


class _Device(ctypes.Structure):
    """VkPhysicalDeviceProperties2 up to the device's name, and room for the rest."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("next", ctypes.POINTER(_Driver)),
        ("versions_and_ids", ctypes.c_uint32 * 4),
        ("device_type", ctypes.c_int),
        ("name", ctypes.c_char * 256),
        ("rest", ctypes.c_uint64 * 256),
    ]


def vulkan_devices() -> list[VulkanDevice] | None:
    """The devices that the Vulkan loader offers, software renderers included; None if there is no loader."""
    vulkan = _loader()
    if vulkan is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint32)
    vulkan.vkCreateInstance.argtypes = [ctypes.POINTER(_Instance), pointer, ctypes.POINTER(pointer)]
    vulkan.vkDestroyInstance.argtypes = [pointer, pointer]
    vulkan.vkEnumeratePhysicalDevices.argtypes = [pointer, number, ctypes.POINTER(pointer)]
    vulkan.vkGetPhysicalDeviceProperties2.argtypes = [pointer, ctypes.POINTER(_Device)]
    application = _Application(type=_APPLICATION_INFO, api_version=_VERSION_1_2)
    info = _Instance(type=_INSTANCE_CREATE_INFO, application=ctypes.pointer(application))
    instance = pointer()
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


def _loader() -> ctypes.CDLL | None:
    """The system's, or the one that SAPIEN ships and names if the system has none."""
    for name in ("libvulkan.so.1", os.environ.get("SAPIEN_VULKAN_LIBRARY_PATH")):
        if name:
            with contextlib.suppress(OSError):
                return ctypes.CDLL(name)
    return None


def _describe(vulkan: ctypes.CDLL, handle: int | None) -> VulkanDevice:
    driver = _Driver(type=_DRIVER_PROPERTIES)
    device = _Device(type=_PROPERTIES_2, next=ctypes.pointer(driver))
    vulkan.vkGetPhysicalDeviceProperties2(handle, ctypes.byref(device))
    name, info = device.name.decode(errors="replace"), driver.info.decode(errors="replace")
    return VulkanDevice(name, device.device_type == _CPU, info)


def vulkan_problem() -> str:
    """What keeps SAPIEN from drawing, with the remedy; empty if nothing does."""
    devices = vulkan_devices()
    if devices is None:
        return f"no Vulkan loader (libvulkan.so.1): {REMEDY}"
    if any(device.usable for device in devices):
        return ""
    found = "; ".join(map(str, devices)) or "none"
    return f"no Vulkan device that SAPIEN can draw with (found: {found}): {REMEDY}"
