-- lockstep is header-only: the one target users need is `lockstep`. `lockstep_compiled` is the same with
-- what is no template compiled once; the rest is tests, examples and benchmarks, which use that.
-- `./x` calls this file with what it found; plain `xmake` works too.
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

-- For the targets that have kernels.
function compile_for_gpus()
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
    on_load(function (target)  -- version.hpp is the one source of the version
        local header = io.readfile(path.join(os.projectdir(), "include/lockstep/version.hpp"))
        target:set("version", header:match('version = "([%d%.]+)"'))
    end)
    add_headerfiles("include/(lockstep/**.hpp)", "include/(lockstep/**.ipp)", "include/(lockstep/**.cuh)")
    add_includedirs("include", {public = true})
    add_sysincludedirs("$(cccl)", {public = true})
    -- A square root that may set errno is not vectorised, which makes Adam three times as slow on a CPU.
    add_cxxflags("-fno-math-errno", {public = true})
    -- `find_package(lockstep)` for CMake, `pkg-config lockstep`, `lockstep-compiled`, `lockstep-lmdb`, `lockstep-gloo` and
    -- `lockstep-torch`.
    -- Nothing in them is of the machine that they were made on. Host code needs none of CCCL's headers, and nvcc finds its own; a CMake
    -- project that has CCCL, or CUDA where it is usually found, gets them for its own use of mdspan as well.
    after_install(function (target)
        local cmakedir = path.join(target:installdir(), "lib/cmake/lockstep")
        local values = {VERSION = target:version()}
        local function write(file, text)
            io.writefile(file, (text:gsub("@(%u+)@", values)))
        end
        write(path.join(cmakedir, "lockstepConfig.cmake"), [[
find_path(lockstep_CCCL cuda/std/mdspan HINTS ${CUDAToolkit_INCLUDE_DIRS} ENV CUDA_PATH ENV CUDA_HOME
  PATHS /usr/local/cuda/include PATH_SUFFIXES cccl include/cccl
  DOC "The folder that holds CCCL's cuda/std: in CUDA's include/cccl, or in pip's nvidia-cuda-cccl")
if(NOT TARGET lockstep::lockstep)
  get_filename_component(lockstep_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
  add_library(lockstep::lockstep INTERFACE IMPORTED)
  target_compile_features(lockstep::lockstep INTERFACE cxx_std_20)
  target_compile_options(lockstep::lockstep INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-fno-math-errno>")
  target_include_directories(lockstep::lockstep SYSTEM INTERFACE "${lockstep_prefix}/include")
  if(EXISTS "${lockstep_CCCL}/cuda/std/mdspan")
    target_include_directories(lockstep::lockstep SYSTEM INTERFACE "${lockstep_CCCL}")
  endif()
  add_library(lockstep::compiled STATIC IMPORTED)
  set_target_properties(lockstep::compiled PROPERTIES
    IMPORTED_LOCATION "${lockstep_prefix}/lib/liblockstep.a"
    INTERFACE_COMPILE_DEFINITIONS LOCKSTEP_COMPILED
    INTERFACE_LINK_LIBRARIES lockstep::lockstep)
endif()
foreach(lockstep_component IN LISTS lockstep_FIND_COMPONENTS)
  set(lockstep_missing "")
  if(lockstep_component STREQUAL "lmdb")  # data sets in LMDB files
    find_path(lockstep_LMDB lmdb.h DOC "The folder that holds lmdb.h")
    find_library(lockstep_LMDB_LIBRARY lmdb HINTS "${lockstep_LMDB}/../lib")
    if(NOT EXISTS "${lockstep_LMDB}/lmdb.h" OR NOT lockstep_LMDB_LIBRARY)
      set(lockstep_missing "lockstep's component lmdb writes LMDB files with liblmdb, which is not found; install its headers (Debian: liblmdb-dev), or set lockstep_LMDB to the folder that holds lmdb.h")
    elseif(NOT TARGET lockstep::lmdb)
      add_library(lockstep::lmdb INTERFACE IMPORTED)
      target_include_directories(lockstep::lmdb SYSTEM INTERFACE "${lockstep_LMDB}")
      target_link_libraries(lockstep::lmdb INTERFACE lockstep::lockstep "${lockstep_LMDB_LIBRARY}")
    endif()
  elseif(lockstep_component STREQUAL "gloo")  # ranks on any hosts
    find_path(lockstep_GLOO gloo/allreduce.h DOC "The folder that holds gloo/allreduce.h")
    find_library(lockstep_GLOO_LIBRARY gloo HINTS "${lockstep_GLOO}/../lib")
    if(NOT EXISTS "${lockstep_GLOO}/gloo/allreduce.h" OR NOT lockstep_GLOO_LIBRARY)
      set(lockstep_missing "lockstep's component gloo connects ranks with Gloo, which is not found; install its headers (Debian: libgloo-dev), or set lockstep_GLOO to the folder that holds gloo/allreduce.h")
    elseif(NOT TARGET lockstep::gloo)
      add_library(lockstep::gloo INTERFACE IMPORTED)
      target_include_directories(lockstep::gloo SYSTEM INTERFACE "${lockstep_GLOO}")
      target_link_libraries(lockstep::gloo INTERFACE lockstep::lockstep "${lockstep_GLOO_LIBRARY}")
      # LibTorch exports functions of a Gloo of its own, which must not be found first. Options come before all libraries, in whichever
      # order a program names those.
      if(lockstep_GLOO_LIBRARY MATCHES "\\.so")
        target_link_options(lockstep::gloo INTERFACE "LINKER:--push-state,--no-as-needed" "${lockstep_GLOO_LIBRARY}" "LINKER:--pop-state")
      endif()
    endif()
  elseif(lockstep_component STREQUAL "torch")  # models that are LibTorch modules
    if(NOT TARGET torch)
      find_package(Torch QUIET)
    endif()
    if(NOT TARGET torch)  # that of the python3 on the path
      find_program(lockstep_PYTHON python3 DOC "A python3 whose package torch is LibTorch")
      if(lockstep_PYTHON)
        execute_process(COMMAND "${lockstep_PYTHON}" -c "import importlib.util, os; print(os.path.dirname(importlib.util.find_spec('torch').origin))"
          OUTPUT_VARIABLE lockstep_torch_folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
        if(EXISTS "${lockstep_torch_folder}/share/cmake/Torch")
          find_package(Torch QUIET PATHS "${lockstep_torch_folder}" NO_DEFAULT_PATH)
        endif()
      endif()
    endif()
    if(NOT TARGET torch)
      set(lockstep_missing "lockstep's component torch trains LibTorch's modules, and find_package(Torch) finds no LibTorch; install one (pip install torch), and set CMAKE_PREFIX_PATH to the folder that holds its include and lib (.../site-packages/torch)")
    elseif(NOT TARGET lockstep::torch)
      add_library(lockstep::torch INTERFACE IMPORTED)
      target_link_libraries(lockstep::torch INTERFACE lockstep::lockstep ${TORCH_LIBRARIES})
      # LibTorch exports a std::filesystem too, of another age, with which a program's calls may end in SIGSEGV.
      # (One option, because CMake drops repeated ones: lockstep::gloo has some of them too.)
      target_link_options(lockstep::torch INTERFACE "SHELL:-Wl,--push-state,--no-as-needed -lstdc++ -Wl,--pop-state")
      # What pip's libraries need lies beside them. They find it when they are loaded; the linker has to be told.
      file(GLOB lockstep_torch_folders "${TORCH_INSTALL_PREFIX}/../torch.libs" "${TORCH_INSTALL_PREFIX}/../nvidia/*/lib")
      foreach(lockstep_torch_folder IN LISTS lockstep_torch_folders)
        target_link_options(lockstep::torch INTERFACE "LINKER:-rpath-link,${lockstep_torch_folder}")
      endforeach()
    endif()
  elseif(lockstep_component STREQUAL "cccl")  # mdspan in host code
    if(NOT lockstep_CCCL)
      set(lockstep_missing "CCCL's headers are not found; set lockstep_CCCL to the folder that holds cuda/std")
    endif()
  else()
    set(lockstep_missing "lockstep has no component ${lockstep_component}; there are lmdb, gloo, torch and cccl")
  endif()
  if(lockstep_missing STREQUAL "")
    set(lockstep_${lockstep_component}_FOUND TRUE)
  elseif(lockstep_FIND_REQUIRED_${lockstep_component})
    set(lockstep_FOUND FALSE)
    set(lockstep_NOT_FOUND_MESSAGE "${lockstep_missing}")
  endif()
endforeach()
]])
        -- below 1.0, a minor version may break what an earlier one promised
        write(path.join(cmakedir, "lockstepConfigVersion.cmake"), [[
set(PACKAGE_VERSION "@VERSION@")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" lockstep_series "${PACKAGE_VERSION}")
if(PACKAGE_FIND_VERSION VERSION_LESS_EQUAL PACKAGE_VERSION AND "${PACKAGE_FIND_VERSION}." MATCHES "^${lockstep_series}\\.")
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
endif()
if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
]])
        -- `-isystem` and its folder are one word, because xmake drops the second of two.
        write(path.join(target:installdir(), "lib/pkgconfig/lockstep.pc"), [[
prefix=${pcfiledir}/../..

Name: lockstep
Description: Synchronous data-parallel training for C++ and CUDA, decided by the compiler
Version: @VERSION@
Cflags: -std=c++20 -fno-math-errno -isystem${prefix}/include
]])
        write(path.join(target:installdir(), "lib/pkgconfig/lockstep-compiled.pc"), [[
prefix=${pcfiledir}/../..

Name: lockstep-compiled
Description: lockstep with all that is no template compiled once
Version: @VERSION@
Requires: lockstep = @VERSION@
Cflags: -DLOCKSTEP_COMPILED
Libs: -L${prefix}/lib -llockstep
]])
        write(path.join(target:installdir(), "lib/pkgconfig/lockstep-lmdb.pc"), [[
Name: lockstep-lmdb
Description: what lockstep needs to write LMDB files, beside lockstep or lockstep-compiled
Version: @VERSION@
Requires: lockstep = @VERSION@ lmdb
]])
        write(path.join(target:installdir(), "lib/pkgconfig/lockstep-gloo.pc"), [[
Name: lockstep-gloo
Description: what lockstep needs to connect ranks with Gloo, beside lockstep or lockstep-compiled, and before lockstep-torch
Version: @VERSION@
Requires: lockstep = @VERSION@
Libs: -Wl,--no-as-needed -lgloo
]])
        write(path.join(target:installdir(), "lib/pkgconfig/lockstep-torch.pc"), [[
torch=/set/by/--define-variable=torch=FOLDER

Name: lockstep-torch
Description: what lockstep needs to train LibTorch modules: the folder that holds LibTorch's include and lib is the variable torch
Version: @VERSION@
Requires: lockstep = @VERSION@
Cflags: -isystem ${torch}/include -isystem ${torch}/include/torch/csrc/api/include
Libs: -Wl,--no-as-needed -lstdc++ -L${torch}/lib -ltorch -ltorch_cpu -lc10 -Wl,-rpath,${torch}/lib -Wl,-rpath-link,${torch}/../torch.libs
]])
    end)
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
