"""Writes entries of the table as the MJCF files that LIBERO and robosuite load."""

import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from envs.libero.assets.placeholder.shapes import Geom, rotation
from envs.libero.assets.placeholder.table import Entry, color, shapes

# In many of LIBERO's initial states, objects overlap each other, a drawer, or the table by centimetres. Stiff contacts
# throw such objects half a metre into the air; soft and slippery ones let them slide apart. Tables and floors are
# softer still, and their parameters alone decide about a contact (solmix). The gripper's pads have their own friction.
OBJECT_CONTACT = {"solref": "0.015 1", "solimp": "0.95 0.99 0.001", "friction": "0.3 0.005 0.0001"}
SURFACE_CONTACT = {"solref": "0.03 1", "solimp": "0.98 0.99 0.001", "solmix": "1000", "friction": "0.95 0.3 0.1"}
DRAWN_ONLY = {"group": "1", "contype": "0", "conaffinity": "0", "mass": "0"}
DEFAULT_REACH = (-0.06, 0.04, 0.025)
CAMERAS = {  # LIBERO moves some of them and adds others
    "frontview": ("1 0 1.45", "0.56 0.43 0.43 0.56"),
    "birdview": ("-0.2 0 3", "0.7071 0 0 0.7071"),
    "agentview": ("0.5 0 1.35", "0.653 0.271 0.271 0.653"),
    "sideview": ("0 1.3 1.5", "0 0 0.5878 0.809"),
}


def model(name: str, entry: Entry, fixture: bool) -> ET.Element:
    """An object, which moves freely, or a fixture, which LIBERO bolts to the world."""
    root = ET.Element("mujoco", model=name)
    asset, world = ET.SubElement(root, "asset"), ET.SubElement(root, "worldbody")
    outer = ET.SubElement(world, "body")
    upright = rotation("x", -90.0) if entry.get("up") == "y" else np.eye(3)
    shift = upright @ np.array([0.0, 0.0, entry.get("base", 0.0)])
    contact = dict(OBJECT_CONTACT)
    if fixture:
        contact["conaffinity"] = "0"  # drawers and doors touch objects and the robot, never the frame around them
    _add_part(outer, asset, {"name": "object", **entry}, upright, shift, contact)
    bottom, top, radius = entry.get("reach", DEFAULT_REACH)
    for site, pos in (
        ("bottom_site", (0, 0, bottom)),
        ("top_site", (0, 0, top)),
        ("horizontal_radius_site", (radius, radius, 0)),
    ):
        ET.SubElement(outer, "site", name=site, pos=_text(pos), size="0.005", rgba="0 0 0 0")
    return root


def room(entry: Entry) -> ET.Element:
    """An arena: floor, walls, light, cameras and the surface that carries the task's objects."""
    root = ET.Element("mujoco", model="room")
    asset, world = ET.SubElement(root, "asset"), ET.SubElement(root, "worldbody")
    sky = {"builtin": "gradient", "rgb1": "0.9 0.9 1", "rgb2": "0.2 0.3 0.4", "width": "64", "height": "64"}
    ET.SubElement(asset, "texture", {"name": "sky", "type": "skybox", **sky})
    # LIBERO replaces the files of these two textures with those of the room's style.
    _add_material(asset, "floor", "texplane", "2d", "gray_ceramic_tile.png", texrepeat="1.5 1.5", texuniform="true")
    _add_material(asset, "walls", "tex-wall", "2d", "gray_plaster.png", texuniform="true", emission="0.12")
    if "texture" in entry:
        kind = "cube" if entry.get("table") else "2d"
        _add_material(asset, "surface", "tex-surface", kind, entry["texture"])
    floor = ET.SubElement(world, "body", name="floor") if entry.get("floor_body") else world
    plane = {"name": "floor", "type": "plane", "size": "3 3 0.125", "group": "1", "condim": "3", "material": "floor"}
    ET.SubElement(floor, "geom", {**plane, **SURFACE_CONTACT})
    for pos, size, normal in (  # the picture lies on the faces across a box's z axis
        ("-2 0 1.5", "1.5 3 0.01", "1 0 0"),
        ("3 0 1.5", "1.5 3 0.01", "1 0 0"),
        ("0.5 3 1.5", "2.5 1.5 0.01", "0 1 0"),
        ("0.5 -3 1.5", "2.5 1.5 0.01", "0 1 0"),
    ):
        ET.SubElement(world, "geom", DRAWN_ONLY, type="box", pos=pos, size=size, zaxis=normal, material="walls")
    if entry.get("table"):
        _add_table(world, entry["surface"])
    elif entry["surface"] != "floor":
        body = ET.SubElement(world, "body", name=entry["surface"])
        _add_geoms(body, asset, _geoms(entry), SURFACE_CONTACT, material="surface")
    decor = _geoms({"shapes": entry.get("decor", ())})
    _add_geoms(world, asset, [geom for geom in decor if geom.color is not None], None)
    for name, pos in (("light1", "1 1 4"), ("light2", "-3 -3 4")):
        light = {"name": name, "pos": pos, "dir": "0 -0.15 -1", "diffuse": "0.8 0.8 0.8", "specular": "0.3 0.3 0.3"}
        ET.SubElement(world, "light", light, directional="false", castshadow="false")
    for name, (pos, quat) in CAMERAS.items():
        ET.SubElement(world, "camera", name=name, mode="fixed", pos=pos, quat=quat)
    return root


def write(file: Path, root: ET.Element) -> None:
    """Write one file, with the folders above it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    ET.indent(root)
    ET.ElementTree(root).write(file, encoding="utf-8")


def _add_table(world: ET.Element, name: str) -> None:
    """A table with the names that LIBERO asks for; LIBERO sets all sizes and positions."""
    body = ET.SubElement(world, "body", name=name, pos="0 0 0.4")
    size = {"type": "box", "size": "0.4 0.4 0.4"}
    ET.SubElement(body, "geom", {**size, "name": "table_collision", "group": "0", **SURFACE_CONTACT})
    ET.SubElement(body, "geom", {**size, "name": "table_visual", "material": "surface", **DRAWN_ONLY})
    ET.SubElement(body, "site", name="table_top", pos="0 0 0.4", size="0.001", rgba="0 0 0 0")
    for leg in range(1, 5):
        look = {"type": "cylinder", "size": "0.05 0.1", "material": "surface", **DRAWN_ONLY}
        ET.SubElement(body, "geom", look, name=f"table_leg{leg}_visual")


def _add_material(asset: ET.Element, name: str, texture: str, kind: str, file: str, **look: str) -> None:
    ET.SubElement(asset, "texture", name=texture, type=kind, file=f"../textures/{file}")
    ET.SubElement(asset, "material", {"name": name, "texture": texture, "specular": "0.1", "shininess": "0.1", **look})


def _add_part(
    parent: ET.Element, asset: ET.Element, part: Entry, rot: np.ndarray, shift: np.ndarray, contact: dict[str, str]
) -> None:
    place: dict[str, str] = {key: _text(part[key]) for key in ("pos", "quat") if key in part}
    body = ET.SubElement(parent, "body", {"name": part["name"], **place})
    if "joint" in part:
        joint = part["joint"]
        limits = {"limited": "true", "range": _text(joint["range"]), "damping": _text([joint["damping"]])}
        kind = {"name": joint["name"], "type": joint["kind"], "axis": _text(joint["axis"])}
        ET.SubElement(body, "joint", kind | limits)
    for site in part.get("sites", ()):
        _add_site(body, site)
    geoms = [geom.moved(rot, shift) for geom in _geoms(part)]
    volume = sum(_volume(geom) for geom in geoms)
    density = {"density": _text([part["mass"] / volume])} if volume else {}
    _add_geoms(body, asset, geoms, contact | density)
    for child in part.get("parts", ()):
        _add_part(body, asset, child, np.eye(3), np.zeros(3), contact)


def _add_site(body: ET.Element, site: Entry) -> None:
    attributes = {
        "name": site["name"],
        "type": site.get("kind", "box"),
        "pos": _text(site["pos"]),
        "quat": _text(site.get("quat", (1, 0, 0, 0))),
        "size": _text(site["size"]),
        "rgba": _text((*color(site["color"]), 1)) if "color" in site else "0 0 0 0",
    }
    ET.SubElement(body, "site", attributes)


def _geoms(part: Entry) -> list[Geom]:
    return [geom for shape in shapes(part.get("shapes", ())) for geom in shape.geoms()]


def _add_geoms(
    body: ET.Element, asset: ET.Element, geoms: list[Geom], contact: dict[str, str] | None, material: str | None = None
) -> None:
    """Drawn geoms go to group 1 and touch nothing; solid geoms go to group 0, which is not drawn.

    If ``contact`` is None, nothing is solid.
    """
    for geom in geoms:
        place = {"type": geom.kind, "pos": _text(geom.pos), "quat": _text(_quaternion(geom.rot))}
        if geom.mesh is not None:
            place["mesh"] = f"mesh{len(asset)}"
            vertices, faces = _text(geom.mesh.vertices.ravel()), " ".join(map(str, geom.mesh.faces.ravel()))
            ET.SubElement(asset, "mesh", name=place["mesh"], vertex=vertices, face=faces)
        else:
            place["size"] = _text(geom.size)
        if geom.color is not None:
            look = {"material": material} if material else {"rgba": _text((*geom.color, 1))}
            ET.SubElement(body, "geom", {**place, **DRAWN_ONLY, **look})
        if geom.solid and contact is not None:
            ET.SubElement(body, "geom", {**place, "group": "0", **contact})


def _volume(geom: Geom) -> float:
    """Volume of a solid primitive, in cubic metres; 0 if it is only drawn."""
    if not geom.solid:
        return 0.0
    if geom.kind == "box":
        return 8 * float(np.prod(geom.size))
    radius, half = geom.size
    return float(np.pi * radius**2 * (2 * half + 4 * radius / 3))


def _quaternion(rot: np.ndarray) -> np.ndarray:
    """[4] (w, x, y, z) of a rotation matrix [3, 3]."""
    trace = rot.trace()
    squares = np.array([trace, *(2 * rot.diagonal() - trace)])  # 4 q_i^2 - 1: the largest divides most safely
    rows = np.array(
        [
            [1 + squares[0], rot[2, 1] - rot[1, 2], rot[0, 2] - rot[2, 0], rot[1, 0] - rot[0, 1]],
            [rot[2, 1] - rot[1, 2], 1 + squares[1], rot[0, 1] + rot[1, 0], rot[0, 2] + rot[2, 0]],
            [rot[0, 2] - rot[2, 0], rot[0, 1] + rot[1, 0], 1 + squares[2], rot[1, 2] + rot[2, 1]],
            [rot[1, 0] - rot[0, 1], rot[0, 2] + rot[2, 0], rot[1, 2] + rot[2, 1], 1 + squares[3]],
        ]
    )
    quat = rows[squares.argmax()]
    return quat / np.linalg.norm(quat)


def _text(numbers: Iterable[float]) -> str:
    return " ".join(f"{float(number):.6g}" for number in numbers)
