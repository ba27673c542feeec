"""What the GL library keeps for lean drawings of one camera and one arrangement of all that stands still."""

import numpy as np

from envs.libero.fast.canvas import Canvas


class View:
    """A picture of what stands still, and display lists of what moves. Free it with ``close``.

    Attributes:
        frame: frame buffer with colours and depths of the picture.
        nearest: float32 [S, H, W], the inverse of the distance of what stands still (``visible_faces.Scratch``).
        lists: display lists, two for each mesh as MuJoCo has them, and ``hook``, which puts the picture back.
        corners: float64 [N, 8, 2], pixels of the solid shapes' bounds when their lists were made.
        resting: bool [N], shapes whose lists stay right as long as these corners stay where they are.
        hidden: bool [N], of them, those that cannot be seen.
    """

    def __init__(self, canvas: Canvas, nearest: np.ndarray, shapes: int) -> None:
        from OpenGL import GL

        self._canvas, self._gl = canvas, GL
        self._buffers = tuple(map(int, GL.glGenRenderbuffers(2)))
        self.frame = self._new_frame()
        self.nearest = np.zeros_like(nearest)
        self.hook = 2 * canvas.model.nmesh
        self.lists = int(GL.glGenLists(self.hook + 1))
        self.corners = np.empty((shapes, 8, 2))
        self.resting, self.hidden = np.zeros(shapes, dtype=bool), np.zeros(shapes, dtype=bool)
        self.forget()
        GL.glNewList(self.lists + self.hook, GL.GL_COMPILE)
        self._copy()
        GL.glEndList()

    def _new_frame(self) -> int:
        """A frame buffer like the canvas's own."""
        GL, context, size = self._gl, self._canvas.context, self._canvas.size
        frame = int(GL.glGenFramebuffers(1))
        GL.glBindFramebuffer(GL.GL_FRAMEBUFFER, frame)
        alike = (context.offColor, GL.GL_COLOR_ATTACHMENT0), (context.offDepthStencil, GL.GL_DEPTH_STENCIL_ATTACHMENT)
        for (like, place), own in zip(alike, self._buffers, strict=True):
            GL.glBindRenderbuffer(GL.GL_RENDERBUFFER, like)
            names = GL.GL_RENDERBUFFER_SAMPLES, GL.GL_RENDERBUFFER_INTERNAL_FORMAT
            samples, kind = (int(GL.glGetRenderbufferParameteriv(GL.GL_RENDERBUFFER, name)) for name in names)
            GL.glBindRenderbuffer(GL.GL_RENDERBUFFER, own)
            GL.glRenderbufferStorageMultisample(GL.GL_RENDERBUFFER, samples, kind, size, size)
            GL.glFramebufferRenderbuffer(GL.GL_FRAMEBUFFER, place, GL.GL_RENDERBUFFER, own)
        return frame

    def keep_picture(self) -> None:
        """Copy what the canvas shows into ``frame``."""
        self._gl.glBindFramebuffer(self._gl.GL_READ_FRAMEBUFFER, self._canvas.context.offFBO)
        self._gl.glBindFramebuffer(self._gl.GL_DRAW_FRAMEBUFFER, self.frame)
        self._copy()

    def _copy(self) -> None:
        GL, size = self._gl, self._canvas.size
        parts = GL.GL_COLOR_BUFFER_BIT | GL.GL_DEPTH_BUFFER_BIT
        GL.glBlitFramebuffer(0, 0, size, size, 0, 0, size, size, parts, GL.GL_NEAREST)

    def forget(self) -> None:
        """Everything may have moved."""
        self.corners[:] = np.nan
        self.resting[:] = self.hidden[:] = False

    def close(self) -> None:
        self._gl.glDeleteLists(self.lists, self.hook + 1)
        self._gl.glDeleteFramebuffers(1, [self.frame])
        self._gl.glDeleteRenderbuffers(2, list(self._buffers))
