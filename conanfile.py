# SPDX-License-Identifier: Apache-2.0
"""lockstep for Conan 2: `conan create .`"""
import re

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import load


class Lockstep(ConanFile):
    name = "lockstep"
    license = "Apache-2.0"
    description = "Synchronous data-parallel training for C++ and CUDA, decided by the compiler"
    settings = "os", "arch", "compiler", "build_type"
    exports_sources = "CMakeLists.txt", "LICENSE", "include/*", "src/*", "packages/*", "tools/*"

    def set_version(self):
        header = load(self, f"{self.recipe_folder}/include/lockstep/version.hpp")
        self.version = re.search(r'version = "([\d.]+)"', header).group(1)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        CMakeToolchain(self).generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()

    def package_info(self):  # find_package(lockstep) finds the package's own files, which have its components
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs.append("lib/cmake/lockstep")
