"""Every name about memory that a libnccl can look up, and what AMem does with each.

A name is about memory if `about_memory` says so. A stock libnccl that knows such a name which is not in this table fails
`./run wheel-test`: somebody has to decide what AMem does with it. A name in REPLACED must really be replaced.

Names are written without the suffixes of versions and default streams (_v2, _ptsz, _ptds), which `base` removes.
"""

import re

# The fragments that make a driver's name one about memory. ncclpatch/intercept/intercept.cpp has the same list, for what
# it journals. Of verbs and GDRCopy every name counts.
FRAGMENTS = ("Mem", "Alloc", "Map", "Unmap", "Multicast", "Ipc", "Pointer", "Host", "Reg", "Unreg", "Handle", "LogicalEndpoint",
             "Value", "Launch", "External", "Array", "Export", "Import", "Fabric")
LIBRARIES = ("ibv_", "mlx5dv_", "gdr_")


def about_memory(name):
    if name.startswith(LIBRARIES):
        return True
    return bool(re.match(r"cu[A-Z]", name)) and any(fragment in name for fragment in FRAGMENTS)


def base(name):
    return re.sub(r"(_v\d+)?(_ptsz|_ptds)?$", "", name)


# NCCL gets a function of AMem's.
REPLACED = frozenset("""
    cuMemCreate cuMemRelease cuMemAddressReserve cuMemAddressFree cuMemMap cuMemUnmap cuMemSetAccess
    cuMemRetainAllocationHandle cuMemGetAllocationPropertiesFromHandle cuMemGetAddressRange
    cuMemExportToShareableHandle cuMemImportFromShareableHandle cuMemGetHandleForAddressRange
    cuMemAlloc cuMemFree cuIpcGetMemHandle cuIpcOpenMemHandle cuIpcCloseMemHandle
    cuMemHostAlloc cuMemAllocHost cuMemFreeHost cuMemHostRegister cuMemHostUnregister
    cuMemAllocAsync cuMemAllocFromPoolAsync cuMemFreeAsync
    cuMemPoolCreate cuMemPoolDestroy cuMemPoolTrimTo cuMemPoolSetAttribute cuMemPoolSetAccess
    cuMemPoolExportToShareableHandle cuMemPoolImportFromShareableHandle cuMemPoolExportPointer cuMemPoolImportPointer
    cuMulticastCreate cuMulticastAddDevice cuMulticastBindMem cuMulticastBindAddr cuMulticastUnbind
    cuLogicalEndpointBindAddr cuLogicalEndpointBindMem cuLogicalEndpointUnbind cuLogicalEndpointDestroy
    cuPointerGetAttribute cuPointerSetAttribute
    cuLaunchKernel cuLaunchKernelEx cuLaunchCooperativeKernel cuLaunchCooperativeKernelMultiDevice cuGraphLaunch
    cuStreamWriteValue32 cuStreamWriteValue64 cuStreamWaitValue32 cuStreamWaitValue64 cuStreamBatchMemOp
    cuStreamIsCapturing cuStreamGetCaptureInfo
    cuMemcpy cuMemcpyAsync cuMemcpyDtoD cuMemcpyDtoDAsync cuMemcpyHtoD cuMemcpyHtoDAsync cuMemcpyDtoH cuMemcpyDtoHAsync
    cuMemcpyPeer cuMemcpyPeerAsync cuMemcpy2D cuMemcpy2DUnaligned cuMemcpy2DAsync cuMemcpy3D cuMemcpy3DAsync cuMemcpy3DPeer
    cuMemcpy3DPeerAsync cuMemcpyBatchAsync cuMemcpyWithAttributesAsync cuMemcpy3DWithAttributesAsync cuMemcpy3DBatchAsync
    cuMemsetD8 cuMemsetD16 cuMemsetD32 cuMemsetD8Async cuMemsetD16Async cuMemsetD32Async
    cuMemsetD2D8 cuMemsetD2D16 cuMemsetD2D32 cuMemsetD2D8Async cuMemsetD2D16Async cuMemsetD2D32Async
    cuGetProcAddress
    ibv_reg_mr ibv_reg_mr_iova ibv_reg_mr_iova2 ibv_reg_mr_ex ibv_rereg_mr ibv_reg_dmabuf_mr ibv_dereg_mr mlx5dv_reg_dmabuf_mr
    mlx5dv_devx_umem_reg mlx5dv_devx_umem_reg_ex mlx5dv_devx_umem_dereg
    gdr_pin_buffer gdr_unpin_buffer cuFileBufRegister cuFileBufDeregister
""".split())

# NCCL gets the driver's function, by reason. Most are looked up by the CUDA runtime inside libnccl, and called by nobody there.
PASSES = {
    "asks about a device or the whole driver, and neither takes nor touches memory": """
        cuMemGetInfo cuMemGetAllocationGranularity cuMulticastGetGranularity cuDeviceTotalMem cuMemHostGetFlags
        cuDeviceGetHostAtomicCapabilities cuLogicalEndpointGetLimits cuLogicalEndpointQuery cuMemGetLocationInfo
        cuOccupancyAvailableDynamicSMemPerBlock cuCtxGetSharedMemConfig cuCtxSetSharedMemConfig cuFuncSetSharedMemConfig""",
    "host memory, which a pause leaves in place": """
        cuMemHostGetDevicePointer""",
    "asks about an address; of one that is paused the driver says that it is nobody's": """
        cuPointerGetAttributes cuMemRangeGetAttribute cuMemRangeGetAttributes""",
    "managed memory, which NCCL does not use": """
        cuMemAllocManaged cuMemAdvise cuMemPrefetchAsync cuMemPrefetchBatchAsync cuMemDiscardBatchAsync
        cuMemDiscardAndPrefetchBatchAsync cuStreamAttachMemAsync""",
    "an allocation of a kind that NCCL does not make; it would stay in place": """
        cuMemAllocPitch cuArrayCreate cuArray3DCreate cuArrayDestroy cuMipmappedArrayCreate cuMipmappedArrayDestroy
        cuMipmappedArrayGetLevel""",
    "asks about an array": """
        cuArrayGetDescriptor cuArray3DGetDescriptor cuArrayGetMemoryRequirements cuArrayGetPlane cuArrayGetSparseProperties
        cuMipmappedArrayGetMemoryRequirements cuMipmappedArrayGetSparseProperties""",
    "memory of another interface (graphics, video, external), which NCCL does not use": """
        cuImportExternalMemory cuDestroyExternalMemory cuExternalMemoryGetMappedBuffer cuExternalMemoryGetMappedMipmappedArray
        cuGLMapBufferObject cuGLMapBufferObjectAsync cuGLRegisterBufferObject cuGLSetBufferObjectMapFlags
        cuGLUnregisterBufferObject cuGLUnmapBufferObject cuGLUnmapBufferObjectAsync
        cuGraphicsMapResources cuGraphicsUnmapResources cuGraphicsResourceGetMappedPointer cuGraphicsResourceSetMapFlags
        cuGraphicsResourceGetMappedEglFrame cuGraphicsResourceGetMappedMipmappedArray cuGraphicsSubResourceGetMappedArray
        cuGraphicsEGLRegisterImage cuGraphicsGLRegisterBuffer cuGraphicsGLRegisterImage cuGraphicsUnregisterResource
        cuGraphicsVDPAURegisterOutputSurface cuGraphicsVDPAURegisterVideoSurface""",
    "semaphores and events of other processes, which hold no memory": """
        cuImportExternalSemaphore cuDestroyExternalSemaphore cuSignalExternalSemaphoresAsync cuWaitExternalSemaphoresAsync
        cuGraphAddExternalSemaphoresSignalNode cuGraphAddExternalSemaphoresWaitNode
        cuGraphExecExternalSemaphoresSignalNodeSetParams cuGraphExecExternalSemaphoresWaitNodeSetParams
        cuGraphExternalSemaphoresSignalNodeGetParams cuGraphExternalSemaphoresSignalNodeSetParams
        cuGraphExternalSemaphoresWaitNodeGetParams cuGraphExternalSemaphoresWaitNodeSetParams
        cuIpcGetEventHandle cuIpcOpenEventHandle""",
    "describes a node of a graph; its launch (cuGraphLaunch) passes through the gate": """
        cuGraphAddMemcpyNode cuGraphAddMemsetNode cuGraphAddMemAllocNode cuGraphAddMemFreeNode cuGraphAddHostNode
        cuGraphExecMemcpyNodeSetParams cuGraphExecMemsetNodeSetParams cuGraphExecHostNodeSetParams
        cuGraphMemcpyNodeGetParams cuGraphMemcpyNodeSetParams cuGraphMemsetNodeGetParams cuGraphMemsetNodeSetParams
        cuGraphMemAllocNodeGetParams cuGraphMemFreeNodeGetParams cuGraphHostNodeGetParams cuGraphHostNodeSetParams
        cuGraphConditionalHandleCreate""",
    "memory that graphs keep, which belongs to whoever made the graph": """
        cuDeviceGetGraphMemAttribute cuDeviceSetGraphMemAttribute cuDeviceGraphMemTrim""",
    "runs a function of the program on the host": """
        cuLaunchHostFunc""",
    "says which pool is meant, or asks about one; a pool of NCCL's own is known since its creation": """
        cuDeviceGetDefaultMemPool cuDeviceGetMemPool cuDeviceSetMemPool cuMemGetDefaultMemPool cuMemGetMemPool cuMemSetMemPool
        cuMemPoolGetAccess cuMemPoolGetAttribute""",
    "makes or names a logical endpoint; memory enters one only by BindAddr and BindMem": """
        cuLogicalEndpointCreate cuLogicalEndpointAddDevice cuLogicalEndpointExport
        cuLogicalEndpointImport cuLogicalEndpointIdReserve cuLogicalEndpointIdRelease""",
    "reports errors, logs and changes to the program": """
        cuLogsRegisterCallback cuLogsUnregisterCallback cuLogsDumpToMemory cuDeviceRegisterAsyncNotification
        cuDeviceUnregisterAsyncNotification cuGetExportTable""",
    "works with memory that was registered or pinned before, which stays in place": """
        gdr_map gdr_unmap gdr_get_info gdr_copy_to_mapping gdr_copy_from_mapping ibv_post_send ibv_post_recv ibv_poll_cq
        mlx5dv_devx_obj_create mlx5dv_devx_obj_modify mlx5dv_devx_obj_query mlx5dv_devx_obj_destroy mlx5dv_devx_general_cmd""",
    "opens, closes or asks about a network card or GDRCopy": """
        gdr_open gdr_close gdr_get_attribute gdr_driver_get_version gdr_runtime_get_version ibv_fork_init ibv_get_device_list
        ibv_free_device_list ibv_get_device_name ibv_open_device ibv_close_device ibv_query_device ibv_query_port
        ibv_query_port_speed ibv_query_gid ibv_query_pkey ibv_query_ece ibv_set_ece ibv_query_qp ibv_get_async_event
        ibv_ack_async_event ibv_event_type_str mlx5dv_is_supported mlx5dv_query_device mlx5dv_get_data_direct_sysfs_path
        mlx5dv_devx_query_eqn mlx5dv_init_obj""",
    "makes queues, domains and doorbells, whose memory is the library's own": """
        ibv_alloc_pd ibv_dealloc_pd ibv_create_ah ibv_destroy_ah ibv_create_cq ibv_destroy_cq ibv_create_qp ibv_modify_qp
        ibv_destroy_qp ibv_create_srq ibv_destroy_srq mlx5dv_create_qp mlx5dv_devx_alloc_uar mlx5dv_devx_free_uar
        mlx5dv_devx_create_event_channel mlx5dv_devx_destroy_event_channel mlx5dv_devx_subscribe_devx_event
        mlx5dv_devx_get_event""",
}
WHY_IT_PASSES = {name: reason for reason, names in PASSES.items() for name in names.split()}


def decided(name):
    """What AMem does with a name: "replaced", or the reason why it passes through; None if nobody has decided yet."""
    name = base(name)
    return "replaced" if name in REPLACED else WHY_IT_PASSES.get(name)
