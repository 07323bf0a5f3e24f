# What lockstep uses beside itself, for find_package and for projects that contain it.
find_path(lockstep_CCCL cuda/std/mdspan HINTS ${CUDAToolkit_INCLUDE_DIRS} ENV CUDA_PATH ENV CUDA_HOME
  PATHS /usr/local/cuda/include PATH_SUFFIXES cccl include/cccl
  DOC "The folder that holds CCCL's cuda/std: in CUDA's include/cccl, or in pip's nvidia-cuda-cccl")

# Defines the target lockstep::NAME, or sets lockstep_missing to a sentence that says what is not found and what to do.
macro(lockstep_add_component name)
  set(lockstep_missing "")
  if("${name}" STREQUAL "lmdb")  # data sets in LMDB files
    find_path(lockstep_LMDB lmdb.h DOC "The folder that holds lmdb.h")
    find_library(lockstep_LMDB_LIBRARY lmdb HINTS "${lockstep_LMDB}/../lib")
    if(NOT EXISTS "${lockstep_LMDB}/lmdb.h" OR NOT lockstep_LMDB_LIBRARY)
      set(lockstep_missing "lockstep's component lmdb writes LMDB files with liblmdb, which is not found; install its headers (Debian: liblmdb-dev), or set lockstep_LMDB to the folder that holds lmdb.h")
    elseif(NOT TARGET lockstep::lmdb)
      add_library(lockstep::lmdb INTERFACE IMPORTED ${lockstep_scope})
      target_include_directories(lockstep::lmdb SYSTEM INTERFACE "${lockstep_LMDB}")
      target_link_libraries(lockstep::lmdb INTERFACE lockstep::lockstep "${lockstep_LMDB_LIBRARY}")
    endif()
  elseif("${name}" STREQUAL "gloo")  # ranks on any hosts
    find_path(lockstep_GLOO gloo/allreduce.h DOC "The folder that holds gloo/allreduce.h")
    find_library(lockstep_GLOO_LIBRARY gloo HINTS "${lockstep_GLOO}/../lib")
    if(NOT EXISTS "${lockstep_GLOO}/gloo/allreduce.h" OR NOT lockstep_GLOO_LIBRARY)
      set(lockstep_missing "lockstep's component gloo connects ranks with Gloo, which is not found; install its headers (Debian: libgloo-dev), or set lockstep_GLOO to the folder that holds gloo/allreduce.h")
    elseif(NOT TARGET lockstep::gloo)
      add_library(lockstep::gloo INTERFACE IMPORTED ${lockstep_scope})
      target_include_directories(lockstep::gloo SYSTEM INTERFACE "${lockstep_GLOO}")
      target_link_libraries(lockstep::gloo INTERFACE lockstep::lockstep "${lockstep_GLOO_LIBRARY}")
      # LibTorch exports functions of a Gloo of its own, which must not be found first. Options come before all libraries, in whichever
      # order a program names those.
      if(lockstep_GLOO_LIBRARY MATCHES "\\.so")
        target_link_options(lockstep::gloo INTERFACE "LINKER:--push-state,--no-as-needed" "${lockstep_GLOO_LIBRARY}" "LINKER:--pop-state")
      endif()
    endif()
  elseif("${name}" STREQUAL "mpi")  # ranks that mpirun starts
    set(MPI_CXX_SKIP_MPICXX TRUE)  # the C interface is enough
    find_package(MPI QUIET COMPONENTS CXX)
    if(NOT TARGET MPI::MPI_CXX)
      set(lockstep_missing "lockstep's component mpi connects ranks with MPI, and find_package(MPI) finds none; install one (Debian: libopenmpi-dev or libmpich-dev), or set MPI_CXX_COMPILER to its wrapper of the compiler")
    elseif(NOT TARGET lockstep::mpi)
      add_library(lockstep::mpi INTERFACE IMPORTED ${lockstep_scope})
      target_link_libraries(lockstep::mpi INTERFACE lockstep::lockstep MPI::MPI_CXX)
    endif()
  elseif("${name}" STREQUAL "torch")  # models that are LibTorch modules
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
      add_library(lockstep::torch INTERFACE IMPORTED ${lockstep_scope})
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
  elseif("${name}" STREQUAL "cccl")  # mdspan in host code
    if(NOT lockstep_CCCL)
      set(lockstep_missing "CCCL's headers are not found; set lockstep_CCCL to the folder that holds cuda/std")
    endif()
  else()
    set(lockstep_missing "lockstep has no component ${name}; there are lmdb, gloo, mpi, torch and cccl")
  endif()
endmacro()
