-- A project that uses an installed lockstep; not part of this one's build.
target("consumer")
    set_kind("binary")
    set_languages("c++20")
    add_files("main.cpp")
    on_load(function (target)
        local lockstep = assert(find_package("pkgconfig::lockstep"), "lockstep is not installed")
        target:add(lockstep)
    end)
