-- Tests, examples and benchmarks, and the library that they use: `lockstep`, header-only, and `lockstep_compiled`, the same with what is
-- no template compiled once. `./x` calls this file with what it found; plain `xmake` works too. CMakeLists.txt makes the packages for others.
set_project("lockstep")
set_xmakever("2.8.5")

set_languages("c++20")
set_warnings("all", "extra", "error")
add_rules("mode.release", "mode.debug")
set_defaultmode("release")
set_policy("build.ccache", false)  -- it would preprocess everything first, for a cache that a fresh clone does not have

option("gpu")
    set_showmenu(true)
    set_description("Compile and link the CUDA parts (found or not, unless said)")
    set_default(os.isfile("/usr/local/cuda/bin/nvcc"))
option_end()

option("nccl")
    set_showmenu(true)
    set_description("Compile what needs NCCL")
    set_default(os.isfile("/usr/local/cuda/include/nccl.h") or os.isfile("/usr/include/nccl.h"))
option_end()

-- The folder of cudnn.h: CUDA's, the system's, or that of pip's nvidia-cudnn-cu13 in ~/.cache/lockstep/cudnn.
local function find_cudnn()
    local cache = os.getenv("XDG_CACHE_HOME") or path.join(os.getenv("HOME") or "/root", ".cache")
    for _, folder in ipairs({os.getenv("LOCKSTEP_CUDNN") or "", "/usr/local/cuda/include", "/usr/include",
                             path.join(cache, "lockstep/cudnn/nvidia/cudnn/include")}) do
        if folder ~= "" and os.isfile(path.join(folder, "cudnn.h")) then return folder end
    end
    return ""
end

option("cudnn")
    set_showmenu(true)
    set_description("The folder that holds cudnn.h, for the convolutions of an example; empty: leave it out")
    set_default(find_cudnn())
option_end()

-- The folder of cudnn_frontend.h: the system's, or that of pip's nvidia-cudnn-frontend in ~/.cache/lockstep/cudnn.
local function find_cudnn_frontend()
    local cache = os.getenv("XDG_CACHE_HOME") or path.join(os.getenv("HOME") or "/root", ".cache")
    for _, folder in ipairs({"/usr/include", path.join(cache, "lockstep/cudnn/include")}) do
        if os.isfile(path.join(folder, "cudnn_frontend.h")) then return folder end
    end
    return ""
end

option("cudnn_frontend")
    set_showmenu(true)
    set_description("The folder that holds cudnn_frontend.h, for the attention of an example; empty: leave it out")
    set_default(find_cudnn_frontend())
option_end()

option("gpu_code")
    set_showmenu(true)
    set_description("The GPUs that tests, examples and benchmarks are compiled for: sm_90, or sm_80,sm_89")
    set_default("sm_90")
option_end()

option("cccl")
    set_showmenu(true)
    set_description("The folder that holds CCCL's cuda/std")
    set_default(os.getenv("LOCKSTEP_CCCL") or "/usr/local/cuda/include/cccl")
option_end()

option("gloo")
    set_showmenu(true)
    set_description("Compile what needs Gloo")
    set_default(os.isfile("/usr/include/gloo/allreduce.h"))
option_end()

option("mpi")
    set_showmenu(true)
    set_description("What mpicc -show prints behind the compiler's name, to compile what needs MPI; empty: leave it out")
    set_default("")
option_end()

option("lmdb")
    set_showmenu(true)
    set_description("Compile what reads and writes LMDB files")
    set_default(os.isfile("/usr/include/lmdb.h"))
option_end()

option("clang")
    set_showmenu(true)
    set_description("A clang++ with the sanitizers' libraries, which compiles most tests; empty: g++ compiles all")
    set_default("")
option_end()

option("eigen")
    set_showmenu(true)
    set_description("The folder that holds Eigen/Core, for the examples' matrix products")
    set_default(os.getenv("LOCKSTEP_EIGEN") or "/usr/include/eigen3")
option_end()

-- The folder of a LibTorch: pip's package `torch` in ~/.cache/lockstep/torch, where `./x test` puts it.
local function find_torch()
    local cache = os.getenv("XDG_CACHE_HOME") or path.join(os.getenv("HOME") or "/root", ".cache")
    return os.dirs(path.join(cache, "lockstep/torch/lib/python3*/site-packages/torch"))[1] or ""
end

option("torch")
    set_showmenu(true)
    set_description("The folder that holds LibTorch's include and lib, as pip's package torch does; empty: leave it out")
    set_default(find_torch())
option_end()

-- For the targets that have kernels. No device code calls another file's: without relocatable code, which xmake would
-- make, kernels take fewer registers, and nothing is linked for the device.
function compile_for_gpus()
    set_values("cuda.rdc", false)
    set_policy("build.cuda.devlink", false)
    for _, code in ipairs((get_config("gpu_code") or "sm_90"):split(",")) do
        add_cugencodes(code)
    end
end

-- For the targets that run where they are built: all instructions that this machine has. g++ 12 takes what its own intrinsics of
-- AVX-512 leave undefined on purpose for a mistake.
function compile_for_this_machine()
    add_cxflags("-march=native")
    add_cxflags("-Wno-uninitialized", "-Wno-maybe-uninitialized", {force = true, tools = {"gcc", "gxx"}})
end

-- For the targets that use cuDNN. Its library is beside the headers, if those are pip's, or where the linker looks.
function has_cudnn()
    return (get_config("cudnn") or "") ~= ""
end
function link_cudnn()
    local folder = get_config("cudnn")
    local library = path.join(path.directory(folder), "lib/libcudnn.so.9")  -- pip's has no other name
    add_sysincludedirs(folder)
    if path.filename(path.directory(folder)) == "cudnn" and os.isfile(library) and get_config("arch") == os.arch() then
        add_ldflags(library, "-Wl,-rpath," .. path.directory(library), {force = true})
    else
        add_links("cudnn")
    end
end

function has_cudnn_frontend()
    return has_cudnn() and (get_config("cudnn_frontend") or "") ~= ""
end

-- For the targets that use MPI. Its headers' warnings are not ours.
function has_mpi()
    return (get_config("mpi") or "") ~= ""
end
function link_mpi()
    for _, flag in ipairs((get_config("mpi") or ""):split("%s+")) do
        if flag:startswith("-I") then
            add_sysincludedirs(flag:sub(3))
        else
            add_ldflags(flag, {force = true})
        end
    end
end

-- For the targets that use LibTorch, with Gloo where it is: libtorch_cpu exports functions of a Gloo and of a standard library
-- (std::filesystem) of its own, so that the system's have to come before it, and must not be dropped where nothing names them.
function has_torch()
    return (get_config("torch") or "") ~= ""
end
function has_torch_for_gpus()
    return has_config("gpu") and has_torch() and os.isfile(path.join(get_config("torch"), "lib/libtorch_cuda.so"))
end
function link_torch()
    local folder = get_config("torch")
    add_sysincludedirs(path.join(folder, "include"), path.join(folder, "include/torch/csrc/api/include"))
    add_defines("LOCKSTEP_HAS_GLOO=" .. (has_config("gloo") and 1 or 0))
    add_ldflags("-Wl,--no-as-needed", "-lstdc++", {force = true})
    if has_config("gloo") then add_ldflags("-lgloo", {force = true}) end
    add_ldflags("-L" .. path.join(folder, "lib"), "-ltorch", "-ltorch_cpu", "-lc10", "-Wl,-rpath," .. path.join(folder, "lib"), {force = true})
    -- What the libraries themselves need lies beside them; they find it by themselves when they are loaded.
    local site = path.directory(folder)
    if has_torch_for_gpus() then add_ldflags("-ltorch_cuda", "-lc10_cuda", {force = true}) end
    for _, beside in ipairs(table.join(os.dirs(path.join(site, "torch.libs")), os.dirs(path.join(site, "nvidia/*/lib")))) do
        add_ldflags("-Wl,-rpath-link," .. beside, {force = true})
    end
end

-- The library: headers, and what else a program needs to include them.
set_group("library")
target("lockstep")
    set_kind("headeronly")
    add_includedirs("include", {public = true})
    add_sysincludedirs("$(cccl)", {public = true})
    -- A square root that may set errno is not vectorised, which makes Adam three times as slow on a CPU.
    add_cxxflags("-fno-math-errno", {public = true})
target_end()

-- For the targets that g++ compiles: it collects its garbage when it has this many KiB, not before, which saves a tenth of its time.
function collect_late()
    add_cxxflags("--param=ggc-min-heapsize=1500000", {force = true, tools = {"gcc", "gxx"}})
end

-- What is no template, compiled once. A program that is compiled with a sanitizer needs the library compiled with it.
function compiled_library(name, sanitizer)
    target(name)
        set_kind("static")
        add_deps("lockstep")
        add_files("$(projectdir)/src/compiled*.cpp")
        add_defines("LOCKSTEP_COMPILED", {public = true})
        collect_late()
        -- Errors name the file that they come from, as its users know it, and not as it is called on this machine.
        add_cxflags("-fPIC", "-ffile-prefix-map=$(projectdir)/=", {force = true})
        if sanitizer then
            set_optimize("none")
            add_cxflags(sanitizer, {force = true})
        else
            set_optimize("fastest")
        end
end

compiled_library("lockstep_compiled")
    set_basename("lockstep")
target_end()

includes("tests", "examples", "bench")
