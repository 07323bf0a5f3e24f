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

option("eigen")
    set_showmenu(true)
    set_description("The folder that holds Eigen/Core, for the examples' matrix products")
    set_default(os.getenv("LOCKSTEP_EIGEN") or "/usr/include/eigen3")
option_end()

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
    -- `find_package(lockstep)` for CMake, `pkg-config lockstep` and `lockstep-compiled`. They name the CCCL
    -- headers that this installation was configured with, for GPU jobs and for mdspan; lockstep_CCCL and
    -- --define-variable=cccl choose others.
    after_install(function (target)
        local cmakedir = path.join(target:installdir(), "lib/cmake/lockstep")
        local values = {VERSION = target:version(), CCCL = get_config("cccl")}
        local function write(file, text)
            io.writefile(file, (text:gsub("@(%u+)@", values)))
        end
        write(path.join(cmakedir, "lockstepConfig.cmake"), [[
set(lockstep_CCCL "@CCCL@" CACHE PATH "The folder that holds CCCL's cuda/std")
if(NOT TARGET lockstep::lockstep)
  get_filename_component(lockstep_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
  add_library(lockstep::lockstep INTERFACE IMPORTED)
  target_compile_features(lockstep::lockstep INTERFACE cxx_std_20)
  target_compile_options(lockstep::lockstep INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-fno-math-errno>")
  target_include_directories(lockstep::lockstep INTERFACE "${lockstep_prefix}/include")
  if(EXISTS "${lockstep_CCCL}/cuda/std/mdspan")
    target_include_directories(lockstep::lockstep SYSTEM INTERFACE "${lockstep_CCCL}")
  endif()
  add_library(lockstep::compiled STATIC IMPORTED)
  set_target_properties(lockstep::compiled PROPERTIES
    IMPORTED_LOCATION "${lockstep_prefix}/lib/liblockstep.a"
    INTERFACE_COMPILE_DEFINITIONS LOCKSTEP_COMPILED
    INTERFACE_LINK_LIBRARIES lockstep::lockstep)
endif()
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
        write(path.join(target:installdir(), "lib/pkgconfig/lockstep.pc"), [[
prefix=${pcfiledir}/../..
cccl=@CCCL@

Name: lockstep
Description: Synchronous data-parallel training for C++ and CUDA, decided by the compiler
Version: @VERSION@
Cflags: -std=c++20 -fno-math-errno -I${prefix}/include -I${cccl}
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
    end)
target_end()

-- What is no template, compiled once. A program that is compiled with a sanitizer needs the library compiled with it.
function compiled_library(name, sanitizer)
    target(name)
        set_kind("static")
        add_deps("lockstep")
        add_files("$(projectdir)/include/lockstep/compiled*.cpp")
        add_defines("LOCKSTEP_COMPILED", {public = true})
        add_cxflags("-fPIC")
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
